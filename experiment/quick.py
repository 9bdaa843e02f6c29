"""Times of chosen rows."""
import sys, torch
sys.path.insert(0, "benchmarks")
import bench_sampling as b
B = int(sys.argv[1]); names = sys.argv[2].split(",") if len(sys.argv) > 2 else None
V = 128256
copies = max(2, min(64, 200_000_000 // (B * V * 4) + 1))
for scale in (1.0, 5.0):
    logits = [torch.randn(B, V, device="cuda").mul_(scale) for _ in range(copies)]
    probs = [x.softmax(-1) for x in logits]
    out = []
    for name, (reads, passes, ours, theirs) in b.calls("cuda").items():
        if names and not any(n in name for n in names): continue
        out.append(f"{name} {b.graph_time(ours, logits if reads == 'logits' else probs):.1f}")
    print("B", B, "scale", scale, "| ".join(out), flush=True)
