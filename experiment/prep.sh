python3 -c "
import time; t=time.time()
from flashinfer.jit.modules.sampling import gen_sampling_module
gen_sampling_module('cuda').build_and_load()
print('built', time.time()-t)" 2>&1 | tail -5
