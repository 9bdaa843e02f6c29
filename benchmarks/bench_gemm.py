"""Compare matrix products, grouped or not, and experts with torch's: time, FLOP/s, bytes per second.

    python benchmarks/bench_gemm.py [--device cpu] [--only grouped] [--json FILE]

Calls alternate. A peer of None is a product that this torch or this device does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import Report, arguments, seconds, sets_for

from flashinfer.fused_moe import RoutingMethodType, cutlass_fused_moe, route
from flashinfer.gemm import (
    batch_deepgemm_fp8_nt_groupwise,
    bmm_bf16,
    bmm_fp8,
    gemm_fp8_nt_groupwise,
    group_gemm_fp8_nt_groupwise,
    mm_bf16,
)
from flashinfer.grouped_mm import grouped_mm_bf16

Calls = list[tuple[Callable[[], object], Callable[[], object] | None]]
FP8 = torch.float8_e4m3fn


class Row(NamedTuple):
    """Product of ``groups`` x ``rows`` rows on average with matrices ``[n, k]``.

    Experts are a layer with ``groups`` experts, sizes ``n`` and ``k``, and ``rows`` tokens with ``top_k``
    experts each.
    """

    name: str
    make: Callable[[Row, str], tuple[Callable[[], object], Callable[[], object] | None]]
    groups: int
    rows: int
    n: int
    k: int
    top_k: int = 0


def draw(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def indptr(row: Row, device: str) -> torch.Tensor:
    """Return numbers of tokens per group, if each token chooses a group at random."""
    owners = torch.randint(0, row.groups, (row.groups * row.rows,))
    counts = torch.bincount(owners, minlength=row.groups)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)


def dense(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    a, b = draw(row.rows, row.k, device=device), draw(row.n, row.k, device=device)
    return lambda: mm_bf16(a, b.t()), lambda: torch.mm(a, b.t())


def batched(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    a, b = draw(row.groups, row.rows, row.k, device=device), draw(row.groups, row.n, row.k, device=device)
    return lambda: bmm_bf16(a, b.mT), lambda: torch.bmm(a, b.mT)


def batched_fp8(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    a = draw(row.groups, row.rows, row.k, device=device, dtype=FP8)
    b, one = draw(row.groups, row.n, row.k, device=device, dtype=FP8), torch.ones((), device=device)

    def peer() -> None:
        for x, y in zip(a, b, strict=True):
            torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16)

    return lambda: bmm_fp8(a, b.mT, one, one, torch.bfloat16), peer if device == "cuda" else None


def grouped(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    a, b = draw(row.groups * row.rows, row.k, device=device), draw(row.groups, row.n, row.k, device=device)
    begins = indptr(row, device)
    return lambda: grouped_mm_bf16(a, b, begins), lambda: torch._grouped_mm(a, b.mT, offs=begins[1:])


def grouped_fp8(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    a = draw(row.groups * row.rows, row.k, device=device, dtype=FP8)
    b = draw(row.groups, row.n, row.k, device=device, dtype=FP8)
    a_scale = torch.rand(len(a), row.k // 128, device=device)
    b_scale, begins = torch.rand(row.groups, -(-row.n // 128), row.k // 128, device=device), indptr(row, device)
    return lambda: group_gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, begins, scale_major_mode="K"), None


def blocks_fp8(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    a, b = draw(row.rows, row.k, device=device, dtype=FP8), draw(row.n, row.k, device=device, dtype=FP8)
    a_scale = torch.rand(row.rows, row.k // 128, device=device)
    b_scale = torch.rand(row.n // 128, row.k // 128, device=device)
    one = torch.ones((), device=device)

    def peer() -> object:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    return lambda: gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K"), peer if device == "cuda" else None


def masked_fp8(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return groups of equal capacity, each with about ``rows`` valid rows of twice as many."""
    a = draw(row.groups, 2 * row.rows, row.k, device=device, dtype=FP8)
    b = draw(row.groups, row.n, row.k, device=device, dtype=FP8)
    a_scale = torch.rand(*a.shape[:2], row.k // 128, device=device)
    b_scale = torch.rand(row.groups, -(-row.n // 128), row.k // 128, device=device)
    counts = torch.full((row.groups,), row.rows, dtype=torch.int32, device=device)
    return lambda: batch_deepgemm_fp8_nt_groupwise(a, b, a_scale, b_scale, counts, row.rows), None


def experts_fp8(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return an fp8 layer with block scales, from its router's logits on."""
    e, n, k = row.groups, row.n, row.k
    first, second = draw(e, 2 * n, k, device=device, dtype=FP8), draw(e, k, n, device=device, dtype=FP8)
    scales = [torch.rand(e, 2 * n // 128, k // 128, device=device), torch.rand(e, k // 128, n // 128, device=device)]
    x, logits = draw(row.rows, k, device=device), torch.randn(row.rows, e, device=device)

    def ours() -> object:
        weights, ids = route(logits, row.top_k, RoutingMethodType.Renormalize)
        return cutlass_fused_moe(x, ids, weights, first, second, x.dtype, scales, use_fp8_block_scaling=True)

    return ours, None


def experts(row: Row, device: str) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return a bfloat16 layer from its router's logits on."""
    tokens, e, top_k = row.rows, row.groups, row.top_k
    first, second = draw(e, 2 * row.n, row.k, device=device) / 45, draw(e, row.k, row.n, device=device) / 30
    x, logits = draw(tokens, row.k, device=device), torch.randn(tokens, e, device=device)

    def ours() -> object:
        weights, ids = route(logits, top_k, RoutingMethodType.Renormalize)
        return cutlass_fused_moe(x, ids, weights, first, second, x.dtype, None)

    @torch.compile(dynamic=False)
    def peer() -> torch.Tensor:
        most, ids = logits.topk(top_k)
        order = ids.flatten().argsort(stable=True)
        owners = ids.flatten()[order]
        ends = torch.searchsorted(owners, torch.arange(e, device=device), right=True).int()
        hidden = torch._grouped_mm(x[order // top_k], first.mT, offs=ends)
        active = torch.nn.functional.silu(hidden[:, row.n :]) * hidden[:, : row.n]
        result = torch._grouped_mm(active, second.mT, offs=ends).float()
        result *= most.softmax(-1).flatten()[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, order // top_k, result).to(x.dtype)

    return ours, peer


ROWS = {
    "cuda": [
        Row("dense", dense, 1, 8192, 8192, 8192),
        Row("dense", dense, 1, 16, 14336, 4096),
        Row("bmm", batched, 16, 4096, 4096, 4096),
        Row("bmm_fp8", batched_fp8, 1, 8192, 8192, 8192),
        Row("bmm_fp8", batched_fp8, 16, 4096, 4096, 4096),
        Row("blocks_fp8", blocks_fp8, 1, 4096, 7168, 16384),
        Row("blocks_fp8", blocks_fp8, 1, 4096, 24576, 1536),
        Row("blocks_fp8", blocks_fp8, 1, 4096, 7168, 2048),
        Row("grouped", grouped, 8, 512, 14336, 4096),
        Row("grouped", grouped, 64, 128, 1408, 2048),
        Row("grouped", grouped, 64, 2, 1408, 2048),
        Row("grouped_fp8", grouped_fp8, 64, 2, 1408, 2048),
        Row("grouped_fp8", grouped_fp8, 16, 32, 4096, 7168),
        Row("grouped_fp8", grouped_fp8, 4, 8192, 4096, 7168),
        Row("grouped_fp8", grouped_fp8, 4, 8192, 7168, 2048),
        Row("masked_fp8", masked_fp8, 16, 32, 4096, 7168),
        Row("experts", experts, 64, 16, 1408, 2048, 8),
        *(Row("experts", experts, 8, tokens, 14336, 4096, 2) for tokens in (1, 64, 4096)),  # Mixtral 8x7B
        *(Row("experts", experts, 128, tokens, 768, 2048, 8) for tokens in (1, 64, 512, 8192)),  # Qwen3-30B-A3B
        Row("experts_fp8", experts_fp8, 32, 128, 2048, 7168, 8),  # a rank of DeepSeek-V3
    ],
    "cpu": [
        Row("dense", dense, 1, 512, 1024, 2048),
        Row("dense", dense, 1, 16, 4096, 2048),
        Row("dense", dense, 1, 1, 8192, 4096),
        Row("grouped", grouped, 8, 64, 1408, 2048),
        Row("grouped", grouped, 8, 2, 1408, 2048),
        Row("bmm_fp8", batched_fp8, 4, 128, 512, 1024),
        Row("blocks_fp8", blocks_fp8, 1, 256, 512, 1024),
        Row("grouped_fp8", grouped_fp8, 8, 2, 1408, 2048),
        Row("experts", experts, 16, 16, 96, 256, 8),
        Row("experts_fp8", experts_fp8, 16, 16, 128, 256, 4),
    ],
}


def in_turns(calls: Calls, device: str, sets: int) -> list[float | None]:
    """Return the seconds of ours and of the peer's, the best median of three rounds of each."""
    best: list[float | None] = [None, None]
    for _ in range(3):
        for which in (0, 1):
            functions = [pair[which] for pair in calls]
            if None not in functions:
                taken = seconds(lambda i, f=functions: f[i](), sets, device, 0.2)  # type: ignore[misc]
                best[which] = min(taken, best[which] or taken)
    return best


def main() -> None:
    options = arguments(__doc__ or "")
    report = Report("gemm")
    for row in ROWS[options.device]:
        if options.only not in row.name:
            continue
        parts = 3 if row.top_k else 1  # weights of gate, up and down projection
        rows = row.rows * (row.top_k or row.groups)
        weights = parts * min(row.groups, rows) * row.n * row.k * (1 if "fp8" in row.name else 2)
        sets = min(sets_for(weights, options.device), 8)
        calls = [row.make(row, options.device) for _ in range(sets)]
        ours, peer = in_turns(calls, options.device, sets)
        assert ours is not None
        products = 2 * parts * rows * row.n * row.k
        report.add(
            "us", ours * 1e6, {} if peer is None else {"torch": peer * 1e6},
            more={"TFLOP/s": products / ours * 1e-12, "TB/s of weights": weights / ours * 1e-12},
            name=row.name, groups=row.groups, rows=row.rows, n=row.n, k=row.k, top_k=row.top_k,
        )  # fmt: skip
    report.write(options.json)


if __name__ == "__main__":
    main()
