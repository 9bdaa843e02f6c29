"""Gradients of attention without a kernel: gradcheck, blocks of the composition, memory."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer._attention import reference as composition

from ..support.attention_oracle import attention, drawn
from .test_prefill_backward import OPTIONS, Ragged, assert_close, options, spread_of, with_mask


@options
def test_gradcheck(options):
    """Compare with finite differences in float64, through the output and the lse."""
    lengths = (4, 5)
    leaves = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 4, 6), (5, 2, 6), (5, 2, 4))
    ]
    if options.get("window_left", -1) > 0:
        options = options | dict(window_left=1)
    ours, theirs = with_mask(options, *lengths, "cpu")
    want, want_lse = attention(*leaves, **theirs)
    visible = want_lse.isfinite()

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flashinfer.single_prefill_with_kv_cache(*tensors, return_lse=True, **ours)
        return out, torch.where(visible, lse, 0.0)

    out, lse = flashinfer.single_prefill_with_kv_cache(*leaves, return_lse=True, **ours)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close((out, lse), (want, want_lse), rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mask", [False, True], ids=["causal", "mask"])
def test_gradcheck_ragged(mask, layout):
    given = dict(mask=0.6) if mask else dict(causal=True)
    batch = Ragged(("cpu", torch.float64, (8, 8)), [3, 0, 2], [4, 3, 1], (4, 2), layout, **given)
    assert torch.autograd.gradcheck(lambda *_: batch.run()[0], batch.leaves, fast_mode=True)
    torch.testing.assert_close(batch.run()[0], batch.want(batch.leaves)[0], rtol=1e-10, atol=1e-10)


def test_every_element_of_a_gradient():
    leaves = [torch.randn(3, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)]
    assert torch.autograd.gradcheck(
        lambda *tensors: flashinfer.single_prefill_with_kv_cache(*tensors, causal=True, return_lse=True), leaves
    )


# The composition takes rotated inputs.
@pytest.mark.parametrize("options", [one for one in OPTIONS if "rope_scale" not in one], ids=str)
def test_blocks_of_the_composition(options, device, monkeypatch):
    """Results of the composition do not depend on the size of its blocks, on any device."""
    lengths, dtype = (37, 90), torch.float32
    q, k, v = (drawn((n, heads, 16), dtype, device) for n, heads in ((37, 4), (90, 2), (90, 2)))
    ours, theirs = with_mask(options, *lengths, device)
    if "mask" in options:
        ours = dict(ours, packed_custom_mask=flashinfer.packbits(ours.pop("custom_mask").flatten(), bitorder="little"))
    mode = ours.get("pos_encoding_mode", "NONE")
    call = composition.CallOptions(
        0, 2 if "mask" in options else int(ours.get("causal", False)), ours.get("window_left", -1), 2 if mode == "ALIBI" else 0,
        ours.get("logits_soft_cap", 0.0), ours.get("sm_scale", 0.25), 1.0, 1e4,
    )  # fmt: skip
    slopes = flashinfer.utils.get_alibi_slopes(4).to(device) if mode == "ALIBI" else None
    oracle = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*oracle, **theirs)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, oracle, grad)
    delta = (out.detach() * grad).sum(-1).to(device)
    packed = ours.get("packed_custom_mask")
    requests = composition.requests_of(q, k, 0, None, None)
    for block, keys in ((1 << 22, 1024), (4 * 7 * 8, 8), (1, 13)):
        monkeypatch.setattr(composition, "BLOCK_ELEMENTS", block)
        monkeypatch.setattr(composition, "BLOCK_KEYS", keys)
        got = composition.gradients(
            q,
            k,
            v,
            grad.to(device, dtype),
            delta.to(dtype),
            lse.detach().to(device, dtype),
            requests,
            call,
            packed,
            slopes,
        )
        assert_close(list(got), list(want), spread_of(options, 16))


def test_memory_is_bounded(monkeypatch, device):
    """No block of logits exceeds its bound, for any lengths."""
    largest = []
    multiply = torch.bmm

    def watched(*args: torch.Tensor) -> torch.Tensor:
        result = multiply(*args)
        largest.append(result.numel())
        return result

    monkeypatch.setattr(torch, "bmm", watched)
    q, k, v = (torch.randn(3000, heads, 8, device=device) for heads in (4, 2, 2))
    call = composition.CallOptions(0, 1, -1, 0, 0.0, 0.3, 1.0, 1e4)
    requests = composition.requests_of(q, k, 0, None, None)
    rows = torch.zeros(3000, 4, device=device)
    composition.gradients(q, k, v, torch.ones_like(q), rows, rows, requests, call, None, None)
    assert len(largest) > 4 and max(largest) <= composition.BLOCK_ELEMENTS < 4 * 3000 * 3000
