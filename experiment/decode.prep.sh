( ./experiment/lab/declab zzz || ( cd experiment/lab; for f in a b c d e main; do nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -I../../include -I. -c $f.cu -o /tmp/lab_$f.o & done; wait; nvcc -gencode=arch=compute_90a,code=sm_90a -cudart static -o declab /tmp/lab_{a,b,c,d,e,main}.o ) ) &
timeout 140 python3 - <<'P'
from flashinfer.jit import ensure
from flashinfer.jit.modules._attention import attention_spec
types = [("bfloat16", "bfloat16", 128), ("float16", "float16", 64), ("float16", "float16", 256), ("bfloat16", "float8_e4m3fn", 128), ("float16", "float8_e5m2", 64), ("float16", "float8_e4m3fn", 64), ("float16", "float8_e4m3fn", 256)]
specs = [attention_spec("decode", "cuda", f"{q}:{kv}:{q}", str(d), "default") for q, kv, d in types]
specs += [attention_spec("decode", "cuda", "float16:float16:float16", "64", v) for v in ("soft_cap", "alibi", "rope")]
import time; t = time.time()
ensure(specs)
print("built", time.time() - t)
P
wait
