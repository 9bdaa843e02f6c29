import torch, sys
from flashinfer.delta_rule import chunk_gated_delta_rule as chunk, fused_recurrent_gated_delta_rule as rec
torch.manual_seed(1)
def err(a,b): a,b=a.double(),b.double(); return float((a-b).square().mean().sqrt()/b.square().mean().sqrt())
worst=0
for B,T,H,HV,K,V,dt in ((2,150,2,4,128,128,torch.bfloat16),(1,300,2,2,64,64,torch.float16),(24,200,3,6,128,128,torch.bfloat16),(3,130,1,2,48,200,torch.bfloat16),(80,66,2,2,64,64,torch.bfloat16),(1,1000,1,3,120,72,torch.float16)):
    n=lambda *s: torch.randn(*s,device="cuda")
    q,k,v=n(B,T,H,K),n(B,T,H,K),n(B,T,HV,V); k=k/k.norm(dim=-1,keepdim=True)
    q,k,v=(x.to(dt) for x in (q,k,v))
    g=-0.02*torch.rand(B,T,HV,device="cuda"); b=torch.rand_like(g); h=n(B,HV,K,V)
    go,gs=n(B,T,HV,V).to(dt),n(B,HV,K,V)
    res=[]
    for f in (lambda q,k,v,g,b,h: chunk(q,k,v,g,b,initial_state=h,output_final_state=True),lambda q,k,v,g,b,h: rec(q,k,v,g,beta=b,initial_state=h,output_final_state=True)):
        l=[x.detach().clone().requires_grad_() for x in (q,k,v,g,b,h)]
        o,s=f(*l); res.append([o,s,*torch.autograd.grad([o,s],l,[go,gs])])
    torch.cuda.synchronize()
    e=[err(x,y) for x,y in zip(*res)]; worst=max(worst,*e)
    print((B,T,H,HV,K,V),str(dt)[6:]," ".join(f"{n}:{x:.1e}" for n,x in zip("o S dq dk dv dg db dh".split(),e)),flush=True)
print("WORST",worst)
