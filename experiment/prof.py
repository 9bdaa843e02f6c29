import sys, time, torch, collections
from flashinfer import delta_rule as D
from flashinfer.delta_rule import chunk_gated_delta_rule as chunk, fused_recurrent_gated_delta_rule as rec
torch.manual_seed(0)
def make(B,T,H,d,dt=torch.bfloat16):
    q,k,v=(torch.randn(B,T,H,d,device="cuda",dtype=dt) for _ in range(3))
    k=k/k.norm(dim=-1,keepdim=True)
    g=-0.02*torch.rand(B,T,H,device="cuda"); return q,k,v,g,torch.rand_like(g)
cache=torch.empty(2**28,dtype=torch.uint8,device="cuda")
def t(f,n=7):
    f(); ts=[]
    for _ in range(n):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_(); a.record(); f(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return sorted(ts)[len(ts)//2]
def fb(f,x):
    def go():
        l=[y.detach().requires_grad_() for y in x]
        return torch.autograd.grad(f(*l),l,x[2])
    return go
F=lambda *x: chunk(*x)[0]
FLA={(8,4096,16,128):(1.003,3.133),(1,32768,16,128):(1.542,4.938),(8,4096,32,64):(1.291,3.487)}
for s in FLA:
    x=make(*s); a=t(lambda:F(*x)); b=t(fb(F,x)); print(s,f"fwd {a:.3f} fwd+bwd {b:.3f}  FLA/ours {FLA[s][0]/a:.2f} {FLA[s][1]/b:.2f}",flush=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(3): fb(F,x)()
        torch.cuda.synchronize()
    print("   "+"  ".join(f"{e.key.split('(')[0].replace('void flashinfer::cuda::','')[:34]} {e.device_time_total/e.count:.0f}us" for e in sorted(p.key_averages(),key=lambda e:-e.device_time_total)[:9]),flush=True)
def rn(x):
    with torch.no_grad(): return rec(x[0],x[1],x[2],x[3],beta=x[4])[0]
if "more" in sys.argv:
    for s in FLA:
        x=make(*s); print(s,f"recurrent fwd {t(lambda: rn(x),3):.3f}",flush=True)
    # crossover
    for B,H,d in ((1,16,128),(8,16,128),(32,16,128),(8,32,64)):
        row=[]
        for T in (16,32,48,64,96,128,256):
            x=make(B,T,H,d); row.append(f"T{T} {1e3*t(lambda:F(*x)):.0f}/{1e3*t(lambda:rn(x)):.0f}")
        print("chunk/recurrent us",B,H,d,*row,flush=True)
    for dt in (torch.float32,torch.bfloat16):
        B,H,d=256,32,128
        q,k,v,g,b=make(B,1,H,d)
        st=torch.randn(B,H,d,d,device="cuda").to(dt)
        for vf in (False,True):
            m=t(lambda:D.delta_rule_step(q,k,v,st,g,b,state_v_first=vf)); print("step",dt,vf,f"{m*1e3:.0f}us {2*st.numel()*st.element_size()/m*1e-9:.2f} TB/s",flush=True)
