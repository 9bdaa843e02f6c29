import sys, torch
sys.path.insert(0, "benchmarks")
from flashinfer.fused_moe import RoutingMethodType, cutlass_fused_moe, route
from flashinfer.fused_moe import operators
from flashinfer._gemm.operators import grouped_gemm
from torch.profiler import profile, ProfilerActivity
from timing import seconds
dev = "cuda"
def draw(*s): return torch.randn(s, device=dev).bfloat16()
for e, per, n, k in ((64, 2, 1408, 2048), (128, 32, 768, 2048), (128, 512, 768, 2048)):
    T = e * per // 8
    sets = 4 if per < 100 else 2
    data = [(draw(e, 2*n, k)/45, draw(e, k, n)/30, draw(T, k), torch.randn(T, e, device=dev)) for _ in range(sets)]
    def layer(i):
        f, s, x, lg = data[i % sets]
        w, ids = route(lg, 8, RoutingMethodType.Renormalize)
        return cutlass_fused_moe(x, ids, w, f, s, x.dtype, None)
    for i in range(4): layer(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for i in range(12): layer(i)
        torch.cuda.synchronize()
    print(f"--- E{e} T{T} n{n} k{k}: graph {seconds(layer, sets, dev, 0.15)*1e6:.0f} us")
    for ev in sorted(prof.key_averages(), key=lambda v: -v.device_time_total)[:8]:
        print(f"  {ev.device_time_total/12:8.1f} us x{ev.count/12:.0f} {ev.key[:110]}")
    prep = []
    for f, s, x, lg in data:
        w, ids = route(lg, 8, RoutingMethodType.Renormalize)
        b, t, r = operators.sort(ids, e, 0)
        hid = torch.empty(T*8, 2*n, device=dev, dtype=torch.bfloat16)
        prep.append((f, s, x, b, t, hid, torch.empty(T*8, k, device=dev, dtype=torch.bfloat16)))
    def gathered(i):
        f, s, x, b, t, hid, perm = prep[i % sets]
        grouped_gemm(hid, x, f, None, None, b, None, None, t, None, 0, 0, 0)
    def permuted(i):
        f, s, x, b, t, hid, perm = prep[i % sets]
        torch.index_select(x, 0, t, out=perm)
    def plain(i):
        f, s, x, b, t, hid, perm = prep[i % sets]
        grouped_gemm(hid, perm, f, None, None, b, None, None, None, None, 0, 0, 0)
    def second(i):
        f, s, x, b, t, hid, perm = prep[i % sets]
        grouped_gemm(perm, hid[:, :n], s, None, None, b, None, None, None, None, 0, 0, 0)
    for name, fn in (("gemm1 gathered", gathered), ("index_select", permuted), ("gemm1 plain", plain), ("gemm2", second)):
        us = seconds(fn, sets, dev, 0.1) * 1e6
        fl = 2 * T * 8 * k * n * (2 if "gemm1" in name else 1)
        print(f"  {name:16s} {us:8.1f} us {fl/us*1e-6:7.0f} TFLOP/s weights {e*n*k*2*(2 if 'gemm1' in name else 1)/us*1e-6:5.2f} TB/s", flush=True)
    def torch_gemm1(i):
        f, s, x, b, t, hid, perm = prep[i % sets]
        return torch._grouped_mm(perm, f.mT, offs=b[1:])
    us = seconds(torch_gemm1, sets, dev, 0.1) * 1e6
    print(f"  torch _grouped_mm 1 {us:8.1f} us", flush=True)
    del data, prep
