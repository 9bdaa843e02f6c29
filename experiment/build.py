import sys
from concurrent.futures import ThreadPoolExecutor
import torch, time
from flashinfer.jit.build import build_jit_specs
from flashinfer.jit.modules.mla import mla_spec
what = sys.argv[1]
t=time.time()
specs = [None]
if what == "base":
    specs += [mla_spec("sm90a", profiler=True), mla_spec("cuda"), mla_spec("cuda", profiler=True)]
build_jit_specs([mla_spec("sm90a")] + specs[1:])
print(what, "built", round(time.time()-t,1), flush=True)
