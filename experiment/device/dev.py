import ctypes, sys, time, glob, os, statistics
import torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LOG2E = 1.4426950408889634
libs = {}
for f in sorted(glob.glob(os.environ.get("LIBS", "/tmp/bw_*.so"))):
    n = os.path.basename(f)[3:-3]
    l = ctypes.CDLL(f)
    l.bw_run.restype = ctypes.c_int64
    libs[n] = l


def ptr(x):
    return ctypes.c_void_p(x.data_ptr() if x is not None else 0)


def make(lib, q, k, v, out, grad, lse, gl, causal, scale, heads=0):
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    S, H, D = q.shape
    Sk, Hk, _ = k.shape
    st = lambda: ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    a = lambda mem: lib.bw_run(
        *(ptr(x) for x in (q, k, v, out, grad, lse, gl, dq, dk, dv)),
        ptr(mem),
        S,
        Sk,
        H,
        Hk,
        D,
        int(causal),
        ctypes.c_float(scale),
        int(q.dtype == torch.bfloat16),
        st(),
        heads,
    )
    n = a(None)
    assert n >= 0, n
    mem = torch.empty(n, dtype=torch.uint8, device="cuda")

    def run(i=0):
        r = a(mem)
        assert r >= 0, r
        return dq, dk, dv

    return run


def ref(q, k, v, grad, gl, causal, scale):
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    g = q.shape[1] // k.shape[1]
    kk, vv = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = torch.einsum("qhd,khd->hqk", q, kk) * scale
    if causal:
        S, Sk = s.shape[1:]
        m = torch.arange(Sk, device="cuda")[None] > torch.arange(S, device="cuda")[:, None] + (Sk - S)
        s = s.masked_fill(m, float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None])
    p = torch.where(torch.isnan(p), 0, p)
    o = torch.einsum("hqk,khd->qhd", p, vv)
    return o, (lse * LOG2E).t(), (q, k, v)


def check(name, lib, S, Sk, H, Hk, D, causal, dt):
    torch.manual_seed(1)
    q, grad = (torch.randn(S, H, D, device="cuda").to(dt) for _ in "ab")
    k, v = (torch.randn(Sk, Hk, D, device="cuda").to(dt) for _ in "ab")
    scale = D**-0.5
    o, lse, leaves = ref(q, k, v, grad, None, causal, scale)
    want = torch.autograd.grad(o, leaves, grad.double() * torch.isfinite(lse)[..., None])
    out = o.detach().to(dt)
    out = torch.nan_to_num(out)
    gl = torch.zeros_like(lse).float().contiguous()
    lse32 = lse.detach().float().contiguous()
    run = make(lib, q, k, v, out, grad, lse32, gl, causal, scale)
    got = [x.clone() for x in run()]
    torch.cuda.synchronize()
    err = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want)]
    same = all(all(torch.equal(a, b) for a, b in zip(got, run())) for _ in range(3))
    print(
        "check",
        name,
        S,
        Sk,
        H,
        Hk,
        D,
        causal,
        str(dt)[6:],
        ["%.1e" % e for e in err],
        "same" if same else "DIFFERENT",
        flush=True,
    )


def burst(f, n):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(n):
        f()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / n


def bench(S, H, Hk, D, causal, which, heads=(0,), peers=True):
    dt = torch.bfloat16
    q, grad = (torch.randn(S, H, D, device="cuda").to(dt) for _ in "ab")
    k, v = (torch.randn(S, Hk, D, device="cuda").to(dt) for _ in "ab")
    scale = D**-0.5
    fs = {}
    qt, kt, vt, gt = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v, grad))
    with torch.no_grad():
        f = torch.ops.aten._scaled_dot_product_flash_attention(
            qt,
            kt if Hk == H else kt.repeat_interleave(H // Hk, 1),
            vt if Hk == H else vt.repeat_interleave(H // Hk, 1),
            0.0,
            causal,
        )
    out = f[0][0].transpose(0, 1).contiguous()
    lse = (f[1][0] * LOG2E).t().float().contiguous()
    gl = torch.zeros_like(lse)
    for n in which:
        for h in heads:
            fs[n + (f"/h{h}" if h else "")] = make(libs[n], q, k, v, out, grad, lse, gl, causal, scale, h)
    if peers:
        for n, be in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            try:
                l = [x.clone().requires_grad_() for x in (qt, kt, vt)]
                with sdpa_kernel(be):
                    o = F.scaled_dot_product_attention(*l, is_causal=causal, enable_gqa=H != Hk)
                fs[n] = lambda o=o, l=l: torch.autograd.grad(o, l, gt, retain_graph=True)
                fs[n]()
            except Exception as e:
                print(n, "failed", str(e)[:100])
                fs.pop(n, None)
    flops = 10 * S * S * H * D / (2 if causal else 1)
    n = max(2, int(8e-3 / (flops / 4e14)))
    n = min(n, 20)
    t = {x: [] for x in fs}
    for r in range(5):
        for x, fn in fs.items():
            if r == 0:
                burst(fn, 2)
            t[x].append(burst(fn, n))
    print(
        f"S{S} {H}/{Hk} d{D} {'causal' if causal else 'full'}:",
        "  ".join(f"{x} {flops / statistics.median(v) / 1e9:.0f}" for x, v in t.items()),
        flush=True,
    )
    if peers and "flash" in fs and which:
        want = fs["flash"]()
        got = fs[which[0]]()
        print(
            "   vs flash",
            [
                "%.1e" % ((a.float() - b[0].transpose(0, 1).float()).norm() / b.float().norm()).item()
                for a, b in zip(got, want)
            ],
            flush=True,
        )
