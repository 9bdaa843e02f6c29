# Kernel times of B1 L32768 apart.
import sys, torch
sys.path.insert(0, "benchmarks")
from bench_mla import planned
from torch.profiler import profile, ProfilerActivity
for shape in [(1,32768,128,64),(1,32768,16,64),(4,32768,128,64)]:
    w, i = planned(*shape, "fa3")
    out = torch.empty_like(i[0].contiguous())
    for _ in range(3): w.run(*i, out=out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(10): w.run(*i, out=out)
        torch.cuda.synchronize()
    ev = [(e.name, e.time_range.start, e.time_range.end) for e in p.events() if "mla" in e.name or "merge" in e.name]
    ev.sort(key=lambda e: e[1])
    print(shape, [(n.split("(")[0][-40:], round(b - a, 1)) for n, a, b in ev[-4:]], "header", w._scheduler.header[:9].tolist() if hasattr(w._scheduler.header, "tolist") else list(w._scheduler.header)[:9], flush=True)
