python3 - <<'P'
from flashinfer.jit.modules.gemm import gen_gemm_module
from flashinfer.jit.modules.fused_moe import gen_fused_moe_module
import time
t=time.time(); gen_gemm_module("cuda").build_and_load(); print("gemm", time.time()-t)
t=time.time(); gen_fused_moe_module("cuda").build_and_load(); print("moe", time.time()-t)
P
find "$FLASHINFER_WORKSPACE_DIR" -name .ninja_log -path "*gemm*" -exec cp {} $OUT/ninja.log \;
