"""Kernels of a run of one long request, apart."""

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from bench_mla import planned

for shape in [(1, 32768, 128, 64), (1, 32768, 16, 64), (4, 32768, 128, 64)]:
    wrapper, inputs = planned(*shape, "fa3")
    out = torch.empty_like(inputs[0].contiguous())
    for _ in range(3):
        wrapper.run(*inputs, out=out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            wrapper.run(*inputs, out=out)
        torch.cuda.synchronize()
    found = sorted((e.time_range.start, e.time_range.end, e.name) for e in seen.events() if "m" in e.name)[-4:]
    begin = found[0][0]
    print(shape, [(n.split("(")[0][-36:], round(a - begin, 1), round(b - begin, 1)) for a, b, n in found], flush=True)
    print("  items, merges, rows of a tile and of a slot, slots:", list(wrapper._scheduler.header)[:5], flush=True)
