"""Tables of plans: integer dtypes, strides, pages of one token, and tables of multi-item scoring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer

from ..support.attention_oracle import (
    Paged,
    assert_near,
    attention,
    batch_attention,
    drawn,
    indptr_of,
    multi_item_mask,
    token_positions,
    workspace,
)
from ..support.plans import bound_calls

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4


@pytest.mark.parametrize("other", [torch.int64, torch.uint8, torch.uint32, "strided"], ids=str)
@pytest.mark.parametrize("near", [False, True])
def test_other_integers(other, near, device):
    def table(x: torch.Tensor) -> torch.Tensor:
        x = x.to(other) if isinstance(other, torch.dtype) else x.repeat_interleave(2)[::2]
        return x if near else x.to(device)

    kv_lens, qo_lens = [9, 1, 14], [2, 1, 3]
    paged = Paged(kv_lens, PAGE, KV_HEADS, DIM, torch.float16, device)
    requests = [paged.request(b) for b in range(3)]
    q = drawn((6, HEADS, DIM), torch.float16, device)
    tables = [table(x) for x in paged.tables_on("cpu")]
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    prefill.plan(table(indptr_of(qo_lens)), *tables, HEADS, KV_HEADS, DIM, PAGE, causal=True)
    assert_near(prefill.run(q, paged.cache), batch_attention(q, qo_lens, requests, causal=True)[0])
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(*tables, HEADS, KV_HEADS, DIM, PAGE)
    assert_near(decode.run(q[:3], paged.cache), batch_attention(q[:3], [1, 1, 1], requests)[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token(layout, device):
    """Caches may omit the dimension of the page size if it is 1."""
    kv_lens, qo_lens = [9, 1, 14], [2, 1, 3]
    paged = Paged(kv_lens, 1, KV_HEADS, DIM, torch.float16, device, layout, "pair")
    k, v = (x.squeeze(1 if layout == "NHD" else 2) for x in paged.cache)
    assert k.dim() == 3
    requests = [paged.request(b) for b in range(3)]
    q = drawn((6, HEADS, DIM), torch.float16, device)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    decode.plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1)
    want, _ = batch_attention(q[:3], [1, 1, 1], requests)
    out = torch.full((3, HEADS, DIM), float("nan"), device=device).half()
    assert_near(decode.run(q[:3], (k, v), out=out), want)
    assert bound_calls(decode).call(q[:3], k, v, (None, None, None)) is not None, "these calls are not bound"
    assert_near(decode.run(q[:3], (k, v), k_scale=torch.ones((), device=device)), want)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
    prefill.plan(indptr_of(qo_lens), *paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 1, causal=True)
    assert_near(prefill.run(q, (k, v)), batch_attention(q, qo_lens, requests, causal=True)[0])
    with pytest.raises(ValueError, match=r"got 1 slots in a page, and plan\(\) was called for 4"):
        prefill.plan(
            indptr_of([1]),
            *Paged([4], 4, KV_HEADS, DIM, torch.float16, device).tables_on("cpu"),
            HEADS,
            KV_HEADS,
            DIM,
            4,
        )
        prefill.run(q[:1], (k, v))


def scored(device: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the oracle's result for one request of a prefix and two items."""
    prefix, items = 5, [3, 4]
    qo_len = sum(items) + len(items) + 1
    kv_len = prefix + qo_len
    q = drawn((qo_len, HEADS, DIM), torch.float16, device)
    k, v = (drawn((kv_len, KV_HEADS, DIM), torch.float16, device) for _ in range(2))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    given = dict(
        prefix_len_ptr=torch.tensor([prefix]),
        token_pos_in_items_ptr=token_positions(items, qo_len),
        token_pos_in_items_len=qo_len,
        max_item_len_ptr=torch.tensor([max(items)]),
    )
    wrapper.plan(indptr_of([qo_len]), indptr_of([kv_len]), HEADS, KV_HEADS, DIM, causal=True, **given | options)
    want, _ = attention(q, k, v, mask=multi_item_mask(qo_len, kv_len, prefix, items))
    return wrapper.run(q, k, v), want


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32, torch.int64])
def test_numbers_of_multi_item_scoring(dtype, device):
    """One request may pass numbers without a dimension, and fewer positions than their length says."""
    positions = token_positions([3, 4], 10).to(torch.int64)
    for options in (
        dict(prefix_len_ptr=torch.tensor(5).to(dtype), max_item_len_ptr=torch.tensor(4).to(torch.uint16)),
        dict(prefix_len_ptr=torch.tensor([5]).to(dtype).to(device), max_item_len_ptr=torch.tensor([4]).to(dtype)),
        dict(token_pos_in_items_len=torch.tensor(100).to(torch.uint32).to(device)),
        dict(token_pos_in_items_ptr=positions.to(dtype), token_pos_in_items_len=100),
        dict(token_pos_in_items_ptr=positions.to(torch.uint16).to(device)),
        dict(token_pos_in_items_ptr=positions[:-1].to(dtype)),  # the last delimiter's zero is optional
    ):
        assert_near(*scored(device, **options))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(prefix_len_ptr=torch.tensor([-1])), ValueError, "prefix_len_ptr: got -1, wanted 0 to 4294967295"),
        (dict(prefix_len_ptr=torch.tensor([[5]])), ValueError, r"prefix_len_ptr: got shape \[1, 1\], wanted a vector"),
        (dict(prefix_len_ptr=torch.tensor([5, 5])), ValueError, "max_item_len_ptr: got 1 elements, wanted 2"),
        (dict(token_pos_in_items_ptr=torch.full((10,), 1 << 16)), ValueError, "token_pos_in_items_ptr: got 65536"),
        (dict(max_item_len_ptr=torch.tensor(4.0)), TypeError, "max_item_len_ptr: got torch.float32, wanted torch.uint16"),
    ],
)  # fmt: skip
def test_mistakes_of_multi_item_scoring(options, error, message, device):
    with pytest.raises(error, match=message):
        scored(device, **options)


def test_multi_item_scoring_needs_a_plan(device):
    """A single request without a plan has an unknown prefix, so its number of positions cannot be checked."""
    from flashinfer._attention.operators import builtin_operators
    from flashinfer._attention.signature import CallArguments, Parameters

    q = drawn((3, HEADS, DIM), torch.float16, device)
    operators = builtin_operators("prefill", device, (torch.float16,) * 3, (DIM, DIM), 0)
    arguments = CallArguments(
        mask_mode=3, prefix_len=torch.zeros(1, dtype=torch.uint32, device=device), token_pos_in_items_len=0,
        token_pos_in_items=torch.zeros(0, dtype=torch.uint16, device=device),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="plan: got none, wanted one for multi-item scoring"):
        operators.run(q, q, q, torch.empty_like(q), None, *arguments, *Parameters())
