experiment/device/variants.sh $OUT
FLASHINFER_CUDA_ARCH_LIST=9.0a python3 -c "
from flashinfer.jit.modules.prefill_backward import gen_prefill_backward_module
gen_prefill_backward_module('cuda').build()"
