"""Compare the backward pass of attention with torch's in one run, without forward passes.

FLOPs are those of five products: 10 * queries * keys * heads * head_dim, halved when causal. Torch has its
fastest layout. `vs_torch` is torch's time over ours. On a CPU calls alternate and the fastest of each counts.
On CUDA short runs of ours, of torch's flash backend and of its cuDNN backend alternate, and the median of
each counts. These are operators without autograd, except cuDNN's, which is slower for it below 0.2 ms.
Columns of cuDNN are missing if it refuses the shape. `composition_ms` is the time of a composition of torch's
functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from bench_attention import both, torch_attention
from bench_prefill import burst
from timing import Report, arguments
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashinfer
from flashinfer._attention import backward as kernels
from flashinfer._attention.reference import LOG2E

Pair = tuple[Callable[[int], object], Callable[[int], object]]
# length, query heads, key heads, head_dim, causal
CASES = {
    "cpu": [
        *((n, heads, heads, 64, causal) for n, heads in ((1024, 8), (4096, 2)) for causal in (False, True)),
        *((n, heads, heads, 128, causal) for n, heads in ((1024, 8), (2048, 4), (4096, 2)) for causal in (False, True)),
        (2048, 8, 2, 128, True),
        (4096, 1, 1, 128, False),
    ],
    "cuda": [
        *((n, 16, 16, dim, causal) for n in (1024, 4096, 16384) for dim in (64, 128) for causal in (False, True)),
        *((n, 16, 4, 128, causal) for n in (1024, 4096) for causal in (False, True)),
        *((4096, 16, 16, 256, causal) for causal in (False, True)),
    ],
}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}


def by_autograd(leaves: list[torch.Tensor], theirs: list[torch.Tensor], grad: torch.Tensor, causal: bool) -> Pair:
    out = flashinfer.single_prefill_with_kv_cache(*leaves, causal=causal)
    their_out, their_grad = torch_attention(*theirs, causal), grad.transpose(0, 1)[None].contiguous()
    return (
        lambda _: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        lambda _: torch.autograd.grad(their_out, theirs, their_grad, retain_graph=True),
    )


@torch.no_grad()
def by_operators(leaves: list[torch.Tensor], theirs: list[torch.Tensor], grad: torch.Tensor, causal: bool) -> Pair:
    leaves, theirs = ([x.detach() for x in one] for one in (leaves, theirs))
    forward = torch.ops.aten._scaled_dot_product_flash_attention(*theirs, 0.0, causal)
    out, lse = forward[0][0].transpose(0, 1).contiguous(), (forward[1][0].t() * LOG2E).contiguous()
    problem = None, None, None, None, 0, int(causal), -1, 0, 0.0, leaves[0].shape[2] ** -0.5, 1.0, 1e4
    of_lse = torch.zeros_like(lse)
    their_grad = grad.transpose(0, 1)[None].contiguous()
    return (
        lambda _: torch.ops.flashinfer.prefill_gradients(*leaves, out, lse, grad, of_lse, *problem),
        lambda _: torch.ops.aten._scaled_dot_product_flash_attention_backward(
            their_grad, *theirs, *forward[:6], 0.0, causal, *forward[6:8]
        ),
    )


def by_cudnn(theirs: list[torch.Tensor], grad: torch.Tensor, causal: bool) -> Callable[[], object] | None:
    """Return torch's cuDNN backend, or ``None`` if it refuses these shapes."""
    their_grad = grad.transpose(0, 1)[None].contiguous()
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                *theirs, is_causal=causal, enable_gqa=theirs[0].shape[1] != theirs[1].shape[1]
            )
        torch.autograd.grad(out, theirs, their_grad, retain_graph=True)
    except RuntimeError:
        return None
    return lambda: torch.autograd.grad(out, theirs, their_grad, retain_graph=True)


def in_a_row(calls: dict[str, Callable[[], object]], flops: int) -> dict[str, float]:
    """Return median seconds of alternating calls, several at a time to hide host time."""
    count = max(1, min(20, int(2e12 / flops)))

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(count)]

    times = burst({name: repeated(call) for name, call in calls.items()})
    return {name: taken / count for name, taken in times.items()}


def composition_seconds(call: Callable[[int], object]) -> float:
    has_kernel, times = kernels._has_kernel, []
    kernels._has_kernel = lambda *_: False
    for _ in range(4):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(0)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    kernels._has_kernel = has_kernel
    return min(times[1:])


def backward(case: tuple[int, int, int, int, bool], name: str, device: str, report: Report) -> None:
    length, qo_heads, kv_heads, dim, causal = case
    dtype = getattr(torch, name)
    leaves = [
        torch.randn(length, heads, dim, device=device).to(dtype).requires_grad_()
        for heads in (qo_heads, kv_heads, kv_heads)
    ]
    theirs = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in leaves]
    grad = torch.randn(length, qo_heads, dim, device=device).to(dtype)
    ours, torchs = (by_autograd if device == "cpu" else by_operators)(leaves, theirs, grad, causal)
    ours(0)
    flops, cudnn = 10 * length * length * qo_heads * dim // (2 if causal else 1), {}
    if device == "cuda":
        calls, third = {"ours": lambda: ours(0), "torch": lambda: torchs(0)}, by_cudnn(theirs, grad, causal)
        times = in_a_row(calls if third is None else {**calls, "cudnn": third}, flops)
        mine, peer = times["ours"], times["torch"]
        if third is not None:
            cudnn = {"cuDNN": flops / times["cudnn"] / 1e9}
    else:
        mine, peer = both(ours, torchs, 1, device)
    composed = {"composition_ms": composition_seconds(ours) * 1e3} if device == "cuda" and length <= 4096 else {}
    report.add(
        "GFLOP/s", flops / mine / 1e9, {"torch SDPA": flops / peer / 1e9, **cudnn}, more={"ms": mine * 1e3, **composed},
        name="gradients of prefill", length=length, heads=f"{qo_heads}/{kv_heads}", head_dim=dim, causal=causal, dtype=name,
    )  # fmt: skip


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("gradients of prefill")
    for name in DTYPES[options.device]:
        for case in CASES[options.device]:
            length, qo_heads, kv_heads, dim, causal = case
            if options.only in f"{length} {qo_heads}/{kv_heads} d{dim} {'causal' if causal else 'full'}":
                backward(case, name, options.device, report)
    report.write(options.json)


if __name__ == "__main__":
    main()
