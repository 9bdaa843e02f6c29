"""Time a few calls of every family, in about a minute. `compare_trees.py` compares two checkouts by these rows.

    python benchmarks/compare_trees.py ../before . bench_regression.py --allow 0.02

Rows call functions that releases since 0.2.7 have, so that an old checkout runs them too. They have no peer: the
benchmark of a family compares with other libraries. On a CPU the same rows have small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from timing import Call, Report, arguments, seconds, sets_for

import flashinfer
from flashinfer import sampling
from flashinfer.delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.gemm import bmm_bf16, gemm_fp8_nt_groupwise, group_gemm_fp8_nt_groupwise
from flashinfer.grouped_mm import grouped_mm_bf16
from flashinfer.mamba import selective_state_update

Row = tuple[str, Call, int]  # name, call, input sets
FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


class Sizes:
    """Sizes of a device: a GPU's exceed its caches."""

    def __init__(self, device: str) -> None:
        self.device, small = device, device == "cpu"
        self.rows, self.batch, self.keys, self.tokens = (64, 4, 256, 256) if small else (16384, 64, 4096, 4096)
        self.vocab, self.experts, self.width = (4096, 4, 256) if small else (128_256, 8, 4096)

    def draw(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def sets(self, *shape: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
        """Return so many tensors that together they exceed the caches."""
        count = sets_for(torch.Size(shape).numel() * dtype.itemsize, self.device)
        return [self.draw(*shape, dtype=dtype) for _ in range(count)]

    def workspace(self) -> torch.Tensor:
        return torch.empty(128 << 20, dtype=torch.uint8, device=self.device)


def by_rows(size: Sizes) -> Iterator[Row]:
    """Yield norms, activations, RoPE, and appending to pages."""
    cols = 4096
    x, wide = size.sets(size.rows, cols), size.sets(size.rows, 2 * cols)
    w, residual, out = size.draw(cols), size.draw(size.rows, cols), torch.empty_like(x[0])
    count = len(x)
    yield "rmsnorm", lambda i: flashinfer.rmsnorm(x[i], w, out=out), count
    yield "gemma_rmsnorm", lambda i: flashinfer.gemma_rmsnorm(x[i], w, out=out), count
    yield "fused_add_rmsnorm", lambda i: flashinfer.fused_add_rmsnorm(x[i], residual, w), count
    yield "silu_and_mul", lambda i: flashinfer.silu_and_mul(wide[i % len(wide)], out=out), count
    yield "gelu_tanh_and_mul", lambda i: flashinfer.gelu_tanh_and_mul(wide[i % len(wide)], out=out), count
    q, k = size.sets(size.rows, 32, 128), size.sets(size.rows, 8, 128)
    position = torch.randint(0, 32768, (size.rows,), dtype=torch.int32, device=size.device)
    angles = size.draw(32768, 128, dtype=torch.float32)
    yield "apply_rope_pos_ids_inplace", lambda i: flashinfer.apply_rope_pos_ids_inplace(q[i], k[i], position), len(q)
    yield (
        "apply_rope_with_cos_sin_cache",
        lambda i: flashinfer.apply_rope_with_cos_sin_cache_inplace(
            position, q[i].view(size.rows, -1), k[i].view(size.rows, -1), 128, angles
        ),
        len(q),
    )
    cache = size.draw(size.rows // 16, 2, 16, 8, 128)
    index = torch.arange(size.rows, dtype=torch.int32, device=size.device)
    indices, indptr = (
        index[: size.rows // 16],
        torch.tensor([0, size.rows // 16], dtype=torch.int32, device=size.device),
    )
    last = torch.full((1,), 16, dtype=torch.int32, device=size.device)
    zero = torch.zeros_like(index)
    yield (
        "append_paged_kv_cache",
        lambda i: flashinfer.append_paged_kv_cache(k[i], k[i], zero, index, cache, indices, indptr, last),
        len(k),
    )


def prefill(size: Sizes) -> Iterator[Row]:
    for dim, heads, kv_heads, causal in (
        (64, 16, 16, True), (128, 32, 8, True), (128, 32, 8, False), (256, 16, 16, True),
    ):  # fmt: skip
        q, k, v = (size.draw(size.tokens, n, dim) for n in (heads, kv_heads, kv_heads))
        yield (
            f"prefill head_dim={dim} causal={causal}",
            lambda i, q=q, k=k, v=v, causal=causal: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=causal),
            2,
        )
    pages, page = size.tokens // 16, 16
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(size.workspace())
    tables = (torch.tensor(one, dtype=torch.int32) for one in ([0, size.tokens], [0, pages]))
    indices, last = torch.randperm(pages).int(), torch.tensor([page], dtype=torch.int32)
    wrapper.plan(*tables, indices, last, 32, 8, 128, page, causal=True, q_data_type=BF16)
    q, cache = size.draw(size.tokens, 32, 128), size.draw(pages, 2, page, 8, 128)
    yield "paged prefill head_dim=128 causal=True", lambda i: wrapper.run(q, cache), 2


def decode(size: Sizes) -> Iterator[Row]:
    for batch, keys, dim, page, kv_dtype in (
        (size.batch, size.keys, 128, 16, BF16), (size.batch, size.keys, 64, 16, BF16), (size.batch, size.keys, 256, 16, BF16),
        (size.batch, size.keys, 128, 1, BF16), (size.batch, size.keys, 128, 16, FP8), (1, 8 * size.keys, 128, 16, BF16),
        (1, size.keys, 128, 16, BF16),
    ):  # fmt: skip
        each = keys // page
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(size.workspace())
        indptr = torch.arange(batch + 1, dtype=torch.int32) * each
        last = torch.full((batch,), page, dtype=torch.int32)
        indices = torch.randperm(batch * each).int().to(size.device)
        types = dict(q_data_type=BF16, kv_data_type=kv_dtype)
        wrapper.plan(indptr, indices, last, 32, 8, dim, page, **types)  # type: ignore[arg-type]
        q, caches = size.draw(batch, 32, dim), size.sets(batch * each, 2, page, 8, dim, dtype=kv_dtype)
        yield (
            f"decode B{batch} L{keys} head_dim={dim} page={page} {kv_dtype}",
            lambda i, wrapper=wrapper, q=q, caches=caches: wrapper.run(q, caches[i]),
            len(caches),
        )
    v, s = size.sets(size.rows, 32, 128), size.draw(size.rows, 32, dtype=torch.float32)
    yield "merge_state", lambda i: flashinfer.merge_state(v[i], s, v[i - 1], s), len(v)


def latent(size: Sizes) -> Iterator[Row]:
    for heads, page in ((128, 64), (16, 64), (128, 1)):
        each = size.keys // page
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(size.workspace())
        starts = torch.arange(size.batch + 1, dtype=torch.int32)
        lens, indices = torch.full((size.batch,), size.keys, dtype=torch.int32), torch.randperm(size.batch * each).int()
        numbers = (heads, 512, 64, page, False, 192**-0.5, BF16, BF16)
        wrapper.plan(starts, starts * each, indices, lens, *numbers)
        q, cache = size.draw(size.batch, heads, 576), size.draw(size.batch * each, page, 576)
        inputs = (*q.split([512, 64], -1), *cache.split([512, 64], -1))
        yield f"mla heads={heads} page={page}", lambda i, wrapper=wrapper, inputs=inputs: wrapper.run(*inputs), 2


def draws(size: Sizes) -> Iterator[Row]:
    logits = size.sets(size.batch * 4, size.vocab, dtype=torch.float32)
    probs = [one.softmax(-1) for one in logits]
    word = torch.ones(1, dtype=torch.int64, device=size.device)
    random: dict[str, Any] = dict(seed=word, offset=word)
    calls: dict[str, Call] = {
        "sampling_from_probs": lambda i: sampling.sampling_from_probs(probs[i], **random),
        "sampling_from_logits": lambda i: sampling.sampling_from_logits(logits[i], **random),
        "top_k": lambda i: sampling.top_k_sampling_from_probs(probs[i], 50, **random),
        "top_p": lambda i: sampling.top_p_sampling_from_probs(probs[i], 0.9, **random),
        "min_p": lambda i: sampling.min_p_sampling_from_probs(probs[i], 0.1, **random),
        "top_k_top_p": lambda i: sampling.top_k_top_p_sampling_from_logits(logits[i], 50, 0.9, **random),
        "softmax": lambda i: sampling.softmax(logits[i]),
        "top_k_renorm": lambda i: sampling.top_k_renorm_probs(probs[i], 50),
        "top_p_renorm": lambda i: sampling.top_p_renorm_probs(probs[i], 0.9),
        "top_k_mask": lambda i: sampling.top_k_mask_logits(logits[i], 50),
    }
    for name, call in calls.items():
        yield f"sampling {name}", call, len(logits)


def recurrent(size: Sizes) -> Iterator[Row]:
    """Yield the delta rule, forward and backward, and a step of Mamba."""
    for heads, dim in ((16, 128), (32, 64)):
        q, k, v = (size.draw(2, size.tokens, heads, dim) for _ in range(3))
        k = k / k.float().norm(dim=-1, keepdim=True).to(BF16)
        g, beta = (
            -0.02 * torch.rand(2, size.tokens, heads, device=size.device),
            torch.rand(2, size.tokens, heads).to(size.device),
        )
        given = (q, k, v, g, beta)
        yield f"delta rule chunks head_dim={dim}", lambda i, given=given: chunk_gated_delta_rule(*given), 2
        leaves = [one.detach().requires_grad_() for one in given]

        def with_gradients(i: int, leaves: list[torch.Tensor] = leaves) -> Any:
            return torch.autograd.grad(chunk_gated_delta_rule(*leaves)[0], leaves, leaves[2].detach())

        yield f"delta rule chunks and gradients head_dim={dim}", with_gradients, 2
    one = [part[:, :1].contiguous() for part in given]
    yield (
        "delta rule step",
        lambda i: fused_recurrent_gated_delta_rule(*one[:4], beta=one[4], output_final_state=True),
        2,
    )
    states = size.sets(size.batch, 64, 64, 128)
    x, dt = size.draw(size.batch, 64, 64), size.draw(size.batch, 64)[..., None].expand(-1, -1, 64)
    decay = -size.draw(64, dtype=torch.float32).abs()[:, None, None].expand(-1, 64, 128)
    b, c = size.draw(size.batch, 8, 128), size.draw(size.batch, 8, 128)
    skip, bias = (size.draw(64)[:, None].expand(-1, 64) for _ in range(2))
    yield (
        "mamba step",
        lambda i: selective_state_update(states[i], x, dt, decay, b, c, skip, dt_bias=bias, dt_softplus=True),
        len(states),
    )


def products(size: Sizes) -> Iterator[Row]:
    width, groups = size.width, size.experts
    a, b = size.draw(groups, 512, width), size.draw(groups, width, width)
    yield "bmm_bf16", lambda i: bmm_bf16(a, b.mT), 2
    indptr = torch.arange(groups + 1, dtype=torch.int32, device=size.device) * 512
    yield "grouped_mm_bf16", lambda i: grouped_mm_bf16(a.view(-1, width), b, indptr), 2
    a8, b8 = a.view(-1, width).to(FP8), b.to(FP8)
    scales = torch.rand(len(a8), width // 128, device=size.device)
    block_scales = torch.rand(groups, width // 128, width // 128, device=size.device)
    yield "gemm_fp8_nt_groupwise", lambda i: gemm_fp8_nt_groupwise(a8, b8[0], scales, block_scales[0], "K"), 2
    yield (
        "group_gemm_fp8_nt_groupwise",
        lambda i: group_gemm_fp8_nt_groupwise(a8, b8, scales, block_scales, indptr, scale_major_mode="K"),
        2,
    )
    first, second = size.draw(groups, 2 * width, width) / 64, size.draw(groups, width, width) / 64
    for rows in (16, 1024):
        x, chosen = size.draw(rows, width), torch.randint(0, groups, (rows, 2), dtype=torch.int32, device=size.device)
        shares = torch.full((rows, 2), 0.5, device=size.device)
        yield (
            f"cutlass_fused_moe tokens={rows}",
            lambda i, x=x, chosen=chosen, shares=shares: cutlass_fused_moe(
                x, chosen, shares, first, second, BF16, quant_scales=[]
            ),
            2,
        )


def main() -> None:
    given = arguments((__doc__ or "").splitlines()[0])
    report, sizes = Report("regression"), Sizes(given.device)
    for family in (by_rows, prefill, decode, latent, draws, recurrent, products):
        for name, call, sets in family(sizes):
            if given.only in name:
                report.add("us", seconds(call, sets, given.device, budget=0.1) * 1e6, name=name)
    report.write(given.json)


if __name__ == "__main__":
    main()
