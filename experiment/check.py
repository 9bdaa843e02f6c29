"""Equality of the big batch with small ones, for many kinds of rows."""
import sys, time, torch
from flashinfer import sampling as s
torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
V = 128256
dev = "cuda"
def rows(kind, B, V):
    z = torch.randn(B, V, device=dev)
    if kind == "flat": l = z
    elif kind == "mid": l = 2.5 * z
    elif kind == "peaked": l = 5 * z
    elif kind == "sorted": l = z.sort(-1).values
    elif kind == "zipf": l = -1.2 * torch.log(torch.argsort(z, -1).float() + 1)
    elif kind == "equal": l = torch.zeros_like(z)
    elif kind == "onehot": l = torch.full_like(z, -1e4); l[:, -1] = 0
    elif kind == "bf16": l = z.bfloat16().float()
    return l
word = lambda v: torch.tensor([v], device=dev, dtype=torch.int64)
def run(f, x, seed):
    big, ok = f(x, seed=word(seed), offset=word(3), slot=torch.arange(x.shape[0], device=dev), return_valid=True)
    parts = [f(x[i:i + 16], seed=word(seed), offset=word(3), slot=torch.arange(i, min(i + 16, x.shape[0]), device=dev), return_valid=True) for i in range(0, x.shape[0], 16)]
    small, sok = (torch.cat([p[j] for p in parts]) for j in (0, 1))
    return int((big != small).sum()), int((ok != sok).sum())
fs = {
 "probs": ("p", lambda x, **k: s.sampling_from_probs(x, **k)),
 "min_p": ("p", lambda x, **k: s.min_p_sampling_from_probs(x, 0.1, **k)),
 "top_k50": ("p", lambda x, **k: s.top_k_sampling_from_probs(x, 50, **k)),
 "joint": ("p", lambda x, **k: s.top_k_top_p_sampling_from_probs(x, 50, 0.9, filter_apply_order="joint", **k)),
 "first": ("p", lambda x, **k: s.top_k_top_p_sampling_from_probs(x, 50, 0.9, **k)),
 "top_p.9": ("p", lambda x, **k: s.top_p_sampling_from_probs(x, 0.9, **k)),
 "top_p.5": ("p", lambda x, **k: s.top_p_sampling_from_probs(x, 0.5, **k)),
 "top_p.999": ("p", lambda x, **k: s.top_p_sampling_from_probs(x, 0.999, **k)),
 "top_p0": ("p", lambda x, **k: s.top_p_sampling_from_probs(x, 1e-6, **k)),
}
bad = 0
for kind in ("flat", "mid", "peaked", "sorted", "zipf", "equal", "onehot", "bf16"):
    for V_, B, dt in ((128256, 300, torch.float32), (32000, 280, torch.float32), (20011, 140, torch.float32), (128256, 150, torch.bfloat16)):
        l = rows(kind, B, V_); p = l.softmax(-1).to(dt); out = []
        if kind == "flat" and dt == torch.float32: p[3, 17] = float("nan"); p[5] = 0
        for name, (_, f) in fs.items():
            a, b = run(f, p, 11)
            if a or b: bad += 1; out.append(f"{name}:{a},{b}")
        pt = torch.rand(B, device=dev); pt[::7] = 1.5; pt[3] = 0
        w, o = s.top_p_sampling_from_probs(p, pt, seed=word(2), offset=word(1), slot=torch.arange(B, device=dev), return_valid=True), None
        w2 = torch.cat([s.top_p_sampling_from_probs(p[i:i+16], pt[i:i+16], seed=word(2), offset=word(1), slot=torch.arange(i, min(i+16, B), device=dev)) for i in range(0, B, 16)])
        n = int((w[0] != w2).sum())
        if n: bad += 1; out.append(f"top_p tensor:{n}")
        for name, x, g in (("softmax", l.to(dt), lambda x: s.softmax(x, temperature=0.7)), ("mask", l.to(dt), lambda x: s.top_k_mask_logits(x, 50)), ("renorm_k", p, lambda x: s.top_k_renorm_probs(x, 50)), ("renorm_p", p, lambda x: s.top_p_renorm_probs(x, 0.9)), ("renorm_p1", p, lambda x: s.top_p_renorm_probs(x, 1.0))):
            big = g(x); small = torch.cat([g(x[i:i+16]) for i in range(0, B, 16)])
            n = int((~((big == small) | (big.isnan() & small.isnan()))).sum())
            if n: bad += 1; out.append(f"{name}:{n} in {int((~((big == small) | (big.isnan() & small.isnan()))).any(-1).sum())} rows")
        if out: print(kind, V_, B, dt, "DIFFER", *out, flush=True)
print("checked, bad groups:", bad, flush=True)
