cat > /tmp/dbuild.py <<'P'
import time, torch
from flashinfer import delta_rule as d
t=time.time()
q,k,v=(torch.randn(1,128,2,64,device="cuda",dtype=torch.bfloat16,requires_grad=True) for _ in range(3))
g=-torch.rand(1,128,2,device="cuda"); b=torch.rand(1,128,2,device="cuda")
o=d.chunk_gated_delta_rule(q,k,v,g,b)[0]; print("forward built", time.time()-t); o.sum().backward(); torch.cuda.synchronize(); print("built", time.time()-t)
P
FLASHINFER_CUDA_ARCH_LIST=8.0+PTX python3 /tmp/dbuild.py &
python3 /tmp/dbuild.py; wait
