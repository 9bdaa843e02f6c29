"""Batches of equally long requests as the heads of one request, with a mask for each."""

from __future__ import annotations

import math
import random

import pytest
import torch

from flashinfer._attention.equal_batch import attend_batch
from flashinfer._attention.operators import builtin_operators
from flashinfer._attention.signature import CallArguments, Parameters
from flashinfer.quantization import packbits

from ..support.attention_oracle import assert_near, attention
from ..support.opcheck import opcheck

# batch_size, num_qo_heads, num_kv_heads, qo_len, kv_len. The last ones are split over CTAs or threads.
SHAPES = [(1, 4, 2, 5, 9), (3, 4, 2, 5, 9), (3, 4, 2, 1, 9), (2, 2, 2, 70, 133), (5, 8, 2, 1, 1500), (2, 4, 1, 3, 1500)]


def inputs(shape: tuple[int, ...], place: tuple[str, torch.dtype], dim: int = 64) -> list[torch.Tensor]:
    batch, qo_heads, kv_heads, qo_len, kv_len = shape
    device, dtype = place
    sizes = (batch, qo_heads, qo_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def place(device, request) -> tuple[str, torch.dtype]:
    return device, torch.float16 if device == "cuda" and request.param == torch.float32 else request.param


def check(q, k, v, mask, causal=False, window_left=-1, cap=0.0, scale=0.1, got=None) -> None:
    """Return the results of the oracle, one request after another."""
    got = attend_batch(q, k, v, mask, causal, window_left, cap, scale) if got is None else got
    batch, qo_len, kv_len = q.shape[0], q.shape[2], k.shape[2]
    assert got.is_contiguous() and got.shape == (batch, qo_len, q.shape[1], v.shape[3]) and got.dtype == q.dtype
    for b in range(batch):
        one = None if mask is None else mask.expand(batch, 1, qo_len, kv_len)[b, 0]
        want, _ = attention(
            *(x[b].transpose(0, 1) for x in (q, k, v)), causal=causal, mask=one, sm_scale=scale,
            window_left=-1 if mask is not None else window_left, logits_soft_cap=cap,
        )  # fmt: skip
        assert_near(got[b], want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks(shape, place):
    batch, _, _, qo_len, kv_len = shape
    q, k, v = inputs(shape, place)
    for sizes in ((batch, 1, qo_len, kv_len), (1, 1, qo_len, kv_len), (batch, 1, 1, kv_len)):
        check(q, k, v, torch.rand(sizes, device=place[0]) < 0.6)
    check(q, k, v, (torch.rand(1, 1, qo_len, kv_len, device=place[0]) < 0.6).expand(batch, -1, -1, -1))
    # A request that consists of padding.
    nothing = torch.ones(batch, 1, 1, kv_len, dtype=torch.bool, device=place[0])
    nothing[-1] = False
    check(q, k, v, nothing)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_masks(shape, place):
    q, k, v = inputs(shape, place)
    cases = [(False, -1, 0.0), (True, -1, 0.0), (True, 4, 0.0), (True, -1, 3.0)]
    if place == ("cpu", torch.bfloat16):  # would need two modules that no other test uses; float32 covers it
        cases.pop()
    for causal, window_left, cap in cases:
        check(q, k, v, None, causal, window_left, cap)


def test_strides(place):
    """Models have tokens before heads, and pass a part of a longer cache."""
    q, k, v = inputs((3, 4, 2, 6, 20), place)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    mask = torch.rand(3, 1, 6, 11, device=place[0]) < 0.6
    check(q, k[:, :, :11], v[:, :, :11], mask)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    check(q, k[:, :, 5:], v[:, :, 5:], None, causal=True)


def test_nothing_to_do(device):
    q, k, v = inputs((0, 4, 2, 3, 5), (device, torch.bfloat16))
    assert attend_batch(q, k, v, None, True, -1, 0.0, 0.1).shape == (0, 3, 4, 64)


def test_opcheck(device):
    for shape in SHAPES[:3]:
        q, k, v = inputs(shape, (device, torch.bfloat16))
        for mask in (None, torch.rand(shape[0], 1, shape[3], shape[4], device=device) < 0.6):
            for lse in (False, True):
                arguments = (q, k, v, mask, False, -1, 0.0, 0.1, lse)
                opcheck(torch.ops.flashinfer.attend_batch.default, arguments)


def test_compiled_sizes_make_one_graph(device):
    torch._dynamo.reset()
    run = torch.compile(attend_batch, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, shape in enumerate(((3, 4, 2, 5, 9), (6, 4, 2, 7, 33), (4, 4, 2, 9, 70), (5, 4, 2, 2, 7))):
        q, k, v = inputs(shape, (device, torch.bfloat16))
        mask = torch.rand(shape[0], 1, shape[3], shape[4], device=device) < 0.6
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            check(q, k, v, mask, got=run(q, k, v, mask, False, -1, 0.0, 0.1))


def drawn_for_gradients(shape, masked: str | None, device: str):
    """Return leaves and a mask in which every query sees a key."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    leaves = [x.requires_grad_() for x in inputs(shape, (device, dtype))]
    if masked is None:
        return leaves, None
    batch, _, _, qo_len, kv_len = shape
    sizes = dict(each=(batch, 1, qo_len, kv_len), one=(1, 1, qo_len, kv_len), keys=(batch, 1, 1, kv_len))[masked]
    mask = torch.rand(sizes, device=device) < 0.6
    mask[..., 0] = True
    return leaves, mask


def check_gradients(out: torch.Tensor, leaves, mask: torch.Tensor | None, shape) -> None:
    """Gradients equal those of torch's functions."""
    check(*leaves, mask, causal=mask is None, got=out)
    grad = torch.randn_like(out)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v = (x.repeat_interleave(shape[1] // x.shape[1], 1) for x in exact)
    seen = torch.ones(shape[3], shape[4], dtype=torch.bool, device=out.device).tril(shape[4] - shape[3])
    logits = (q @ k.mT * 0.1).masked_fill(~(seen if mask is None else mask), -math.inf)
    want = torch.autograd.grad((logits.softmax(-1) @ v).transpose(1, 2), exact, grad.double())
    limit = 1e-5 if out.is_cpu else 1e-2
    for got, one in zip(torch.autograd.grad(out, leaves, grad), want, strict=True):
        assert (got.double() - one).abs().max() <= limit * one.abs().max().clamp(min=1)  # a single key has gradient 0


@pytest.mark.parametrize("masked", [None, "one", "each", "keys"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 5, 9), (3, 4, 2, 1, 9), (1, 2, 2, 7, 8)], ids=str)
def test_gradients(shape, masked, device):
    leaves, mask = drawn_for_gradients(shape, masked, device)
    check_gradients(attend_batch(*leaves, mask, masked is None, -1, 0.0, 0.1), leaves, mask, shape)


@pytest.mark.parametrize("masked", [None, "each"])
def test_gradients_of_batches_of_any_size_make_one_graph(masked, device):
    torch._dynamo.reset()
    run = torch.compile(attend_batch, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, shape in enumerate(((3, 4, 2, 5, 9), (6, 4, 2, 7, 33), (4, 4, 2, 9, 70))):
        leaves, mask = drawn_for_gradients(shape, masked, device)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            check_gradients(run(*leaves, mask, masked is None, -1, 0.0, 0.1), leaves, mask, shape)


def test_gradients_of_nothing(device):
    leaves = [x.requires_grad_() for x in inputs((0, 4, 2, 3, 5), (device, torch.bfloat16))]
    out = attend_batch(*leaves, None, True, -1, 0.0, 0.1)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (0, 3, 4, 64) and [x.shape for x in grads] == [x.shape for x in leaves]


def test_lse(place):
    """The lse equals that of single requests, and is -inf for a query without keys."""
    q, k, v = inputs((3, 4, 2, 5, 9), place)
    mask = torch.rand(3, 1, 5, 9, device=place[0]) < 0.6
    mask[1, 0, 2] = False
    _, lse = torch.ops.flashinfer.attend_batch(q, k, v, mask, False, -1, 0.0, 0.1, True)
    logits = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.1
    want = logits.masked_fill(~mask, -math.inf).logsumexp(-1).transpose(1, 2) / math.log(2)
    torch.testing.assert_close(lse.double(), want, rtol=1e-3, atol=1e-3)


def test_masks_for_groups_of_key_heads(device):
    """Without a plan, the number of masks divides the key heads, and masks have enough bits."""
    dtype, kv_len = torch.bfloat16, random.randint(9, 40)
    _, k, v = (x[0] for x in inputs((1, 8, 4, 1, kv_len), (device, dtype)))
    q = torch.randn(1, 8, 64, device=device).to(dtype)
    operators = builtin_operators("decode", device, (dtype,) * 3, (64, 64), 0)

    def run(masks: int, bits: int = kv_len) -> None:
        step = (bits + 7) // 8
        packed = packbits(torch.ones(masks * step * 8, dtype=torch.bool, device=device), "little")
        indptr = torch.arange(masks + 1, dtype=torch.int32, device=device) * step
        arguments = CallArguments(custom_mask=packed, mask_indptr=indptr, kv_layout=1, mask_mode=2)
        operators.run(q, k, v, torch.empty_like(q), None, *arguments, *Parameters(sm_scale=0.125))

    for masks in (1, 2, 4):
        run(masks)
    with pytest.raises(RuntimeError, match="mask_indptr: got 3 masks, wanted a divisor of the 4 heads of k"):
        run(3)
    with pytest.raises(RuntimeError, match="custom_mask: got fewer bits than queries times keys"):
        run(2, kv_len - 8)
