"""Tests of our functions inside compiled operators of a user, against float64, with new data in every call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashinfer

from ..support.attention_oracle import (
    Paged,
    assert_near,
    attention,
    batch_attention,
    drawn,
    indptr_of,
    rotated,
    visible,
    workspace,
)
from ..support.opcheck import opcheck

# torch's own, where Inductor is imported.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
    pytest.mark.usefixtures("cold_dynamo"),
]

HEADS, KV_HEADS, DIM, DTYPE = 6, 2, 64, torch.float16
# Both modes compile the same code for a CPU.
MODES = ["default", *(["reduce-overhead"] if torch.cuda.is_available() else [])]
LIBRARY = torch.library.Library("flashinfer_user", "FRAGMENT")
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


# The operators, in both of torch's forms.


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return flashinfer.single_prefill_with_kv_cache(q, k, v, packed_custom_mask=packed_mask, return_lse=True)


def masked_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


by_custom_op = torch.library.custom_op("flashinfer_user::masked", masked, mutates_args=())
by_custom_op.register_fake(masked_fake)

LIBRARY.define("masked_defined(Tensor q, Tensor k, Tensor v, Tensor packed_mask) -> (Tensor, Tensor)",
               tags=(torch.Tag.pt2_compliant_tag,))  # fmt: skip
LIBRARY.impl("masked_defined", masked, "CompositeExplicitAutograd")
torch.library.register_fake("flashinfer_user::masked_defined", masked_fake, lib=LIBRARY)

FORMS: dict[str, Attend] = {
    "custom_op": by_custom_op,
    "Library.define": torch.ops.flashinfer_user.masked_defined,
    "traced": masked,  # without an operator of the user
}


def compiled(function: Callable[..., Any], mode: str, dynamic: bool | None = None) -> Callable[..., Any]:
    """Compile a function and clone its results: results of a CUDA graph live until its next replay."""
    graph = torch.compile(function, fullgraph=True, mode=mode, dynamic=dynamic)

    def call(*args: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        result = graph(*args)
        return result.clone() if isinstance(result, torch.Tensor) else tuple(one.clone() for one in result)

    return call


def inputs(device: str, *shape: int, qo_len: int, kv_len: int) -> list[torch.Tensor]:
    sizes = ((qo_len, HEADS), (kv_len, KV_HEADS), (kv_len, KV_HEADS))
    return [drawn((*shape, length, heads, DIM), DTYPE, device) for length, heads in sizes]


def mask_of(device: str, qo_len: int, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask as booleans and as packed bits."""
    bits = torch.rand(qo_len, kv_len) < 0.5
    return bits, flashinfer.packbits(bits.flatten().to(device), bitorder="little")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_in_a_custom_operator(form, mode, device):
    """A scalar that was read from a tensor once failed here."""
    attend = FORMS[form]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = attend(q * 2, k, v, mask)
        return out + 1, lse

    call = compiled(layer, mode)
    for _ in range(4):
        q, k, v = inputs(device, qo_len=13, kv_len=29)
        bits, packed = mask_of(device, 13, 29)
        out, lse = call(q, k, v, packed)
        want, want_lse = attention(q * 2, k, v, mask=bits)
        assert_near(out - 1, want, lse, want_lse, tolerance=6e-3)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("form", [form for form in FORMS if form != "traced"])
def test_opcheck_of_the_users_operators(form, device):
    q, k, v = inputs(device, qo_len=5, kv_len=9)
    operator = getattr(torch.ops.flashinfer_user, "masked" if form == "custom_op" else "masked_defined").default
    opcheck(operator, (q, k, v, mask_of(device, 5, 9)[1]))


# Batches of requests of one length


def by_loop(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    """Call attention once per request, each with its mask."""
    return tuple(map(torch.stack, zip(*(attend(*one) for one in zip(q, k, v, mask, strict=True)), strict=True)))


def as_heads(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    """Treat the batch as more heads of one request, with one mask.

    Query head b * H + h uses key head (b * H + h) // group = b * KV_H + h // group.
    """
    batch = q.shape[0]
    flat = [x.transpose(0, 1).flatten(1, 2) for x in (q, k, v)]
    return tuple(x.unflatten(1, (batch, HEADS)).transpose(0, 1) for x in attend(*flat, mask))


def by_blocks(attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
    """Treat the batch as one request of all tokens, with the caller's block-diagonal mask."""
    return tuple(x.unflatten(0, q.shape[:2]) for x in attend(*(x.flatten(0, 1) for x in (q, k, v)), mask))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [by_loop, as_heads, by_blocks])
def test_a_batch(way, form, device):
    batch, qo_len, kv_len = 3, 7, 19
    call = compiled(lambda *args: way(FORMS[form], *args), "reduce-overhead")
    for _ in range(3):
        q, k, v = inputs(device, batch, qo_len=qo_len, kv_len=kv_len)
        masks = [mask_of(device, qo_len, kv_len) for _ in range(batch)]
        if way is as_heads:
            masks = masks[:1] * batch
        packed = masks[0][1]
        if way is by_loop:
            packed = torch.stack([one for _, one in masks])
        elif way is by_blocks:
            whole = torch.block_diag(*(bits for bits, _ in masks)).bool()
            packed = flashinfer.packbits(whole.flatten().to(device), bitorder="little")
        out, lse = call(q, k, v, packed)
        for b in range(batch):
            want, want_lse = attention(q[b], k[b], v[b], mask=masks[b][0])
            assert_near(out[b], want, lse[b], want_lse)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_reshaped_batch_gives_wrong_values(device):
    """Without a mask, tokens of a reshaped batch see other requests, as the guide says."""
    q, k, v = inputs(device, 2, qo_len=8, kv_len=8)
    out = flashinfer.single_prefill_with_kv_cache(*(x.flatten(0, 1) for x in (q, k, v)), causal=True)
    assert_near(out[:8], attention(q[0], k[0], v[0], causal=True)[0])
    with pytest.raises(AssertionError, match="rows differ"):
        assert_near(out[8:], attention(q[1], k[1], v[1], causal=True)[0])


# The ragged wrapper, planned outside of the graph. An operator finds the wrapper by a number: it cannot take one.

WRAPPERS: list[Any] = []


def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wrapper: int) -> tuple[torch.Tensor, torch.Tensor]:
    return WRAPPERS[wrapper].run(q, k, v, return_lse=True)


def planned_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wrapper: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


planned_op = torch.library.custom_op("flashinfer_user::planned", planned, mutates_args=())
planned_op.register_fake(planned_fake)
LIBRARY.define("planned_defined(Tensor q, Tensor k, Tensor v, int wrapper) -> (Tensor, Tensor)",
               tags=(torch.Tag.pt2_compliant_tag,))  # fmt: skip
LIBRARY.impl("planned_defined", planned, "CompositeExplicitAutograd")
torch.library.register_fake("flashinfer_user::planned_defined", planned_fake, lib=LIBRARY)
PLANNED = {
    "custom_op": planned_op,
    "Library.define": torch.ops.flashinfer_user.planned_defined,
    "traced": planned,
}


@pytest.mark.parametrize("form", PLANNED)
@pytest.mark.parametrize("lengths", ["fixed", "varying"])
def test_the_ragged_wrapper(lengths, form, device):
    """One graph serves all lengths of one sum. With ``use_cuda_graph``, a captured run reads the wrapper's buffers."""
    batch, total = 4, 48
    buffers = [torch.zeros(batch + 1, dtype=torch.int32, device=device) for _ in range(2)]
    mask_buffers = [torch.zeros(1 << 14, dtype=torch.uint8, device=device), torch.zeros_like(buffers[0])]
    WRAPPERS[:] = [
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", True, *buffers, *mask_buffers)
    ]
    attend = PLANNED[form]
    call = compiled(lambda q, k, v: attend(q, k, v, 0), "reduce-overhead")
    for _ in range(4):
        lens = [total // batch] * batch
        if lengths == "varying":
            cuts = sorted(random.sample(range(1, total), batch - 1))
            lens = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
        masks = [torch.rand(n, n) < 0.5 for n in lens]
        WRAPPERS[0].plan(
            indptr_of(lens), indptr_of(lens), HEADS, KV_HEADS, DIM, q_data_type=DTYPE,
            custom_mask=torch.cat([mask.flatten() for mask in masks]),
        )  # fmt: skip
        q, k, v = inputs(device, qo_len=total, kv_len=total)
        out, lse = call(q, k, v)
        requests = list(zip(k.split(lens), v.split(lens), strict=True))
        want, want_lse = batch_attention(q, lens, requests, masks)
        assert_near(out, want, lse, want_lse)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("form", PLANNED)
def test_the_ragged_wrapper_with_any_number_of_requests(form, device):
    """Without CUDA graphs, plans have any size."""
    WRAPPERS[:] = [flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))]
    attend = PLANNED[form]
    call = compiled(lambda q, k, v: attend(q, k, v, 0), "default", dynamic=True)
    for _ in range(4):
        lens = [random.randint(1, 30) for _ in range(random.choice([3, 4, 7, 8]))]
        kv_lens = [n + random.randint(0, 9) for n in lens]
        WRAPPERS[0].plan(indptr_of(lens), indptr_of(kv_lens), HEADS, KV_HEADS, DIM, causal=True, q_data_type=DTYPE)
        q, k, v = inputs(device, qo_len=sum(lens), kv_len=sum(kv_lens))
        requests = list(zip(k.split(kv_lens), v.split(kv_lens), strict=True))
        out, lse = call(q, k, v)
        assert_near(out, *batch_attention(q, lens, requests, causal=True)[:1])
        assert bool(lse.isfinite().all())


# Other functions inside an operator that writes its arguments


def norm_and_rope(q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, pos_ids: torch.Tensor) -> torch.Tensor:
    flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids, interleave=False)
    return flashinfer.rmsnorm(q.flatten(1), weight, eps=1e-5)


norm_and_rope_op = torch.library.custom_op("flashinfer_user::norm_and_rope", norm_and_rope, mutates_args=("q", "k"))
norm_and_rope_op.register_fake(lambda q, k, weight, pos_ids: q.new_empty(q.flatten(1).shape))


def decode(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    WRAPPERS[0].run(q, cache, out=out, lse=lse)


decode_op = torch.library.custom_op("flashinfer_user::decode", decode, mutates_args=("out", "lse"))
decode_op.register_fake(lambda q, cache, out, lse: None)


@pytest.mark.parametrize("mode", MODES)
def test_norm_and_rope(mode, device):
    call = compiled(lambda q, k, w, ids: (norm_and_rope_op(q, k, w, ids), q * 1, k * 1), mode)
    for _ in range(3):
        q, k = (drawn((9, heads, DIM), DTYPE, device) for heads in (HEADS, KV_HEADS))
        weight, ids = drawn((HEADS * DIM,), DTYPE, device), torch.randint(0, 500, (9,), device=device)
        want_q, want_k = (rotated(x.double(), ids, 1.0, 1e4) for x in (q, k))
        flat = want_q.flatten(1)
        want = flat * (flat.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        y, got_q, got_k = call(q, k, weight, ids)
        for got, wanted in ((y, want), (got_q, want_q), (got_k, want_k), (q, want_q), (k, want_k)):
            assert_near(got, wanted.cpu())


@pytest.mark.parametrize("mode", MODES)
def test_decode(mode, device):
    batch, pages = 4, 60
    buffers = [torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, pages, batch)]
    WRAPPERS[:] = [flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)]
    cache = torch.zeros(pages + 2, 2, 8, KV_HEADS, DIM, dtype=DTYPE, device=device)

    def step(q: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        decode_op(q, cache, out, lse)
        return out, lse

    call = compiled(step, mode)
    for _ in range(4):
        paged = Paged([random.randint(1, 100) for _ in range(batch)], 8, KV_HEADS, DIM, DTYPE, device)
        cache[: len(paged.k)] = paged.cache
        WRAPPERS[0].plan(*paged.tables_on("cpu"), HEADS, KV_HEADS, DIM, 8, q_data_type=DTYPE)
        q = drawn((batch, HEADS, DIM), DTYPE, device)
        want, want_lse = batch_attention(q, [1] * batch, [paged.request(b) for b in range(batch)])
        out, lse = call(q, cache)
        assert_near(out, want, lse, want_lse)
    assert counters["stats"]["unique_graphs"] == 1


def test_causal_equals_a_causal_mask(device):
    """``causal=True`` replaces a causal custom mask, as the guide says."""
    q, k, v = inputs(device, qo_len=9, kv_len=14)
    packed = flashinfer.packbits(visible(9, 14, causal=True).flatten().to(device), bitorder="little")
    torch.testing.assert_close(
        masked(q, k, v, packed)[0], flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True)
    )
