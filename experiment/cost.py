# Cost of events: on over off, in turns in one process.
import sys, statistics
import torch, flashinfer
from flashinfer import profiler
sys.path.insert(0, "benchmarks")
RUNS = 10
def graph(f):
    f(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(RUNS): f()
    return g
def ms(g):
    s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    s.record(); g.replay(); e.record(); torch.cuda.synchronize(); return s.elapsed_time(e) / RUNS * 1e3
def mla(b, l, h, p, backend, on):
    cache = torch.randn(b * l // p, p, 576, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    q = torch.randn(b, h, 576, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16()
    st = torch.arange(b + 1, dtype=torch.int32)
    w = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend=backend)
    w.plan(st, st * (l // p), torch.arange(b * l // p).int(), torch.full((b,), l).int(), h, 512, 64, p, False, 192**-0.5, torch.bfloat16, torch.bfloat16, use_profiler=on)
    buf = torch.zeros(1 << 22, dtype=torch.int64, device="cuda") if on else None
    out = torch.empty(b, h, 512, dtype=torch.bfloat16, device="cuda")
    a = (q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:])
    return (lambda: w.run(*a, out=out, profiler_buffer=buf)), out, buf
def prefill(b, s, on, backend):
    q = torch.randn(b * s, 32, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    k, v = (torch.randn(b * s, 8, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(2 + i)).bfloat16() for i in range(2))
    w = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend=backend)
    buf = torch.zeros(1 << 22, dtype=torch.int64, device="cuda") if on else None
    if on: profiler.attach(w, buf)
    ind = torch.arange(b + 1, dtype=torch.int32) * s
    w.plan(ind, ind, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
    out = torch.empty_like(q)
    return (lambda: w.run(q, k, v, out=out)), out, buf
from flashinfer._profiler.buffer import read
cases = {"mla fa3 B64 H128": lambda on: mla(64, 4096, 128, 64, "fa3", on), "mla fa3 B132 H16": lambda on: mla(132, 4096, 16, 64, "fa3", on),
  "mla fa3 page 1": lambda on: mla(64, 4096, 128, 1, "fa3", on), "mla fa2 B64 H128": lambda on: mla(64, 4096, 128, 64, "fa2", on),
  "prefill fa3 4k": lambda on: prefill(4, 4096, on, "fa3"), "prefill fa2 4k": lambda on: prefill(4, 4096, on, "fa2")}
only = sys.argv[1] if len(sys.argv) > 1 else ""
for name, make in cases.items():
    if only and only not in name: continue
    try:
        (f0, o0, _), (f1, o1, buf) = make(False), make(True)
        g0, g1 = graph(f0), graph(f1)
        a, b = [], []
        for _ in range(9): a.append(ms(g0)); b.append(ms(g1))
        rec = read(buf)
        print(f"{name}: off {statistics.median(a):.1f} us on {statistics.median(b):.1f} us ratio {statistics.median(b)/statistics.median(a):.3f} equal {torch.equal(o0, o1)} dropped {rec.dropped} records {sum(len(t.records) for t in rec.tracks)}", flush=True)
    except Exception as e:
        print(name, "FAILED", repr(e)[:300], flush=True)
