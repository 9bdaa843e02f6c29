import torch
from flashinfer.delta_rule import chunk_gated_delta_rule as chunk
for B,T,H,HV,K,V in ((1,150,1,2,128,128),(1,130,2,2,64,64),(1,70,1,1,48,40),(40,70,3,3,128,128)):
    q,k=(torch.randn(B,T,H,K,device="cuda",dtype=torch.bfloat16)/8 for _ in range(2)); v=torch.randn(B,T,HV,V,device="cuda",dtype=torch.bfloat16)
    l=[x.requires_grad_() for x in (q,k,v,-torch.rand(B,T,HV,device="cuda"),torch.rand(B,T,HV,device="cuda"))]
    o,s=chunk(*l,output_final_state=True)
    torch.autograd.grad([o,s],l,[o.detach(),s.detach()]); torch.cuda.synchronize(); print("ok",B,T,K,V,flush=True)
