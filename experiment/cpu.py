import sys, time, torch
sys.path.insert(0, "benchmarks")
import bench_sampling as b
torch.set_num_threads(1); torch.manual_seed(1)
V = 128256
names = sys.argv[1].split(",") if len(sys.argv) > 1 else None
t_too = len(sys.argv) > 2
def best(f, xs):
    f(xs[0]); ts = []
    for _ in range(15):
        for x in xs:
            t = time.thread_time_ns(); 
            f(x); ts.append((time.thread_time_ns() - t) / 1e3)
    return min(ts)
for scale in (1.0, 5.0):
    l = [torch.randn(1, V).mul_(scale) for _ in range(2)]; p = [x.softmax(-1) for x in l]
    for name, (reads, passes, ours, theirs) in b.calls("cpu").items():
        if names and not any(n in name for n in names): continue
        xs = l if reads == "logits" else p
        print(f"{name:22} {scale} {best(ours, xs):8.1f}", f"torch {best(theirs, xs):8.1f}" if t_too else "", flush=True)
