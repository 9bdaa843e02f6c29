"""Compare the delta rule with the same chunked rule in torch, eager and compiled by Inductor, in one run.

On CUDA also compare the chunk form with the recurrent one.

    python benchmarks/bench_delta_rule.py [--device cpu] [--only NAME] [--json FILE]

Each line has milliseconds of the forward pass, and of forward and backward pass. On a CPU they are CPU time
of all threads, which other processes change least (OMP_NUM_THREADS=1 for one thread). On CUDA there are three
shapes of large training runs with a cold cache, without torch's form, which exceeds the memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import Report, arguments

from flashinfer.delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

CHUNK = 64
# batch, tokens, heads, head dim
SHAPES = {
    "cpu": [(1, 2048, 8, 128), (4, 512, 8, 64), (1, 1024, 4, 256)],
    "cuda": [(8, 4096, 16, 128), (1, 32768, 16, 128), (8, 4096, 32, 64)],
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def in_torch(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
    """Compute the gated rule by chunks of 64 tokens: triangular systems, products, a loop over chunks."""
    batch, tokens, heads, keys = q.shape
    chunks = tokens // CHUNK
    q, k, v, g, beta = (
        one.float().transpose(1, 2).reshape(batch, heads, chunks, CHUNK, *one.shape[3:]) for one in (q, k, v, g, beta)
    )
    sums = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    gam = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, -math.inf).exp()
    system = (k @ k.mT * gam * beta[..., None]).tril(-1) + torch.eye(CHUNK, device=q.device)
    inverse = torch.linalg.solve_triangular(system, torch.diag_embed(beta), upper=False, unitriangular=True)
    w, u = inverse @ (k * sums.exp()[..., None]), inverse @ v
    scores = keys**-0.5 * (q @ k.mT) * gam
    q, rest = keys**-0.5 * q * sums.exp()[..., None], k * (sums[..., -1:] - sums).exp()[..., None]
    last = sums[..., -1].exp()
    state = q.new_zeros(batch, heads, keys, v.shape[-1])
    out = []
    for c in range(chunks):
        new = u[:, :, c] - w[:, :, c] @ state
        out.append(q[:, :, c] @ state + scores[:, :, c] @ new)
        state = state * last[:, :, c, None, None] + rest[:, :, c].mT @ new
    return torch.stack(out, 2).reshape(batch, heads, tokens, -1).transpose(1, 2)


def ours(*tensors: Any) -> torch.Tensor:
    return chunk_gated_delta_rule(*tensors)[0]


def recurrent(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
    return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0]


def with_backward(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor) -> Any:
        leaves = [one.detach().requires_grad_() for one in tensors]
        return torch.autograd.grad(function(*leaves), leaves, tensors[2])

    return call


def milliseconds(calls: dict[str, Callable[[], Any]], device: str, rounds: int = 9) -> dict[str, float]:
    """Return the best time of each. Calls alternate, so other processes disturb all of them equally."""

    cache = torch.empty(2**28 if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def once(call: Callable[[], Any]) -> float:
        if device != "cuda":
            start = time.process_time()
            call()
            return time.process_time() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    for call in calls.values():
        call()
    times = [{name: once(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: 1e3 * min(one[name] for one in times) for name in calls}


def main() -> None:
    given = arguments(__doc__ or "")
    report = Report("the delta rule next to torch's")
    for batch, tokens, heads, dim in SHAPES[given.device]:
        name = f"B{batch} T{tokens} H{heads} d{dim}"
        if given.only not in name:
            continue
        kind: dict[str, Any] = dict(device=given.device, dtype=DTYPES[given.device])
        q, k, v = (torch.randn(batch, tokens, heads, dim, **kind) for _ in range(3))
        k = k / k.norm(dim=-1, keepdim=True)
        g = -0.02 * torch.rand(batch, tokens, heads, device=given.device)
        tensors = (q, k, v, g, torch.rand_like(g))
        torch._dynamo.reset()
        forms = {"ours": ours}
        if given.device == "cpu":
            forms |= {"eager": in_torch, "compiled": torch.compile(in_torch, fullgraph=True, dynamic=False)}
            error = (ours(*tensors) - in_torch(*tensors)).abs().max()
            assert error < 1e-4, error
        else:
            forms["recurrent"] = recurrent
        for title, wrap in (("forward", lambda one: one), ("with backward", with_backward)):
            calls: dict[str, Callable[[], Any]] = {one: partial(wrap(form), *tensors) for one, form in forms.items()}
            times = milliseconds(calls, given.device)
            own = times.pop("ours")
            report.add("ms", own, times, name=f"{name} {title}")
    report.write(given.json)


if __name__ == "__main__":
    main()
