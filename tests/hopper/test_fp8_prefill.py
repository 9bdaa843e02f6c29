"""Prefill with queries, keys and values of 8 bits against float64, on Hopper.

P is rounded to e4m3 too, which has four significant bits. The error is 2.6 % of the output's norm if many
keys count, and 0 if a single one does.
"""

from __future__ import annotations

import pytest
import torch

import flashinfer
from tests.support.attention_oracle import Paged, attention, batch_attention, drawn, indptr_of, workspace

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wanted a GPU of compute capability 9.0",
)


def near(got: torch.Tensor, want: torch.Tensor, lse: torch.Tensor | None = None, want_lse=None) -> None:
    error, norm = (got.cpu().double() - want).norm(dim=-1), want.norm(dim=-1)
    assert bool((error <= 0.09 * norm).all()), float((error / norm).nan_to_num(9.0, 9.0).max())
    assert float(error.norm()) <= 0.035 * float(norm.norm())
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=1e-3, atol=1e-3)


def scales_of(heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [0.5 + torch.rand(n, device="cuda") for n in (heads, kv_heads, kv_heads)]


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.cpu().double() * scale.cpu().double()[:, None]


@pytest.mark.parametrize("dtype, dim", [(E4M3, 64), (E4M3, 128), (E4M3, 256), (E5M2, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_one_request(dtype, dim, causal):
    for qo_len, kv_len, heads, kv_heads in ((1, 1, 1, 1), (77, 300, 4, 2), (515, 515, 5, 1), (130, 1025, 2, 2)):
        q, k, v = (
            drawn((n, h, dim), dtype, "cuda") for n, h in ((qo_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
        )
        scales = scales_of(heads, kv_heads)
        for given in (scales, [0.7, None, 1.25], [scales[0], 2.0, scales[2][:1]]):
            out, lse = flashinfer.single_prefill_with_kv_cache(
                q, k, v, *given, causal=causal, return_lse=True, o_dtype=torch.bfloat16
            )
            by_head = [
                torch.ones(n) * (1.0 if one is None else one.cpu() if isinstance(one, torch.Tensor) else one)
                for one, n in zip(given, (heads, kv_heads, kv_heads), strict=True)
            ]
            wide = [scaled(x.double(), scale) for x, scale in zip((q, k, v), by_head, strict=True)]
            near(out, *(attention(*wide, causal=causal)[:1]), lse, attention(*wide, causal=causal)[1])
    assert flashinfer.single_prefill_with_kv_cache(q, k, v).dtype == torch.float16


@pytest.mark.parametrize("page_size", [None, 16, 64, 1])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window_left": 40}, {"sm_scale": -0.1}])
def test_batches(page_size, options):
    qo_lens, kv_lens, heads, kv_heads, dim = [7, 0, 200, 1, 33], [40, 16, 2100, 0, 500], 8, 2, 128
    paged = Paged(kv_lens, page_size or 16, kv_heads, dim, E4M3, "cuda")
    q = drawn((sum(qo_lens), heads, dim), E4M3, "cuda")
    scales = scales_of(heads, kv_heads)
    requests = [tuple(scaled(x, s) for x, s in zip(paged.request(b), scales[1:], strict=True)) for b in range(5)]
    want, want_lse = batch_attention(scaled(q.double(), scales[0]), qo_lens, requests, **options)
    plan = {"q_data_type": E4M3, **options}
    if page_size is None:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cuda"))
        wrapper.plan(indptr_of(qo_lens), indptr_of(kv_lens), heads, kv_heads, dim, **plan)
        inputs = [torch.cat([paged.request(b)[i] for b in range(5)]).to(E4M3).cuda() for i in range(2)]
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
        wrapper.plan(indptr_of(qo_lens), *paged.tables_on("cpu"), heads, kv_heads, dim, page_size, **plan)
        inputs = [paged.cache]
    out = torch.full((sum(qo_lens), heads, dim), torch.nan, dtype=torch.float16, device="cuda")
    lse = torch.full((sum(qo_lens), heads), torch.nan, device="cuda")
    wrapper.run(q, *inputs, *scales, out=out, lse=lse)
    near(out, want, lse, want_lse)
    again, _ = wrapper.run(q, *inputs, *scales, return_lse=True)
    assert torch.equal(out, again)


def test_unsupported_calls():
    q = drawn((4, 2, 64), E4M3, "cuda")
    with pytest.raises(ValueError, match="q: got float8_e4m3fn, wanted one of float16, bfloat16 on cuda"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, backend="fa2")
    with pytest.raises(ValueError, match="scale_k: got shape \\[3\\], wanted one number or \\[2\\]"):
        flashinfer.single_prefill_with_kv_cache(q, q, q, None, torch.ones(3, device="cuda"))
