"""softmax, renormalised and masked rows, and top_k, against float64 and sorting."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

from ..support.sampling_oracle import KINDS, rows_of, top_k_threshold, top_p_thresholds

VOCABS = [1, 2, 111, 513, 5000, 128256]


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("temperature", [None, 0.3, 0.0, "each"])
def test_softmax(vocab_size, temperature, dtype, device):
    logits = (torch.randn(4, vocab_size) * 4).to(dtype)
    logits[1, ::2] = -float("inf") if vocab_size > 1 else 0.0
    each = torch.tensor([1.0, 0.5, 0.0, 2.0])
    given = each.to(device) if temperature == "each" else temperature
    out = sampling.softmax(logits.to(device), given)
    assert out.dtype == torch.float32
    for row in range(4):
        t = float(each[row]) if temperature == "each" else 1.0 if temperature is None else temperature
        x = logits[row].double()
        want = torch.softmax(x / t, -1) if t else (x == x.max()).double() / (x == x.max()).sum()
        torch.testing.assert_close(out[row].cpu().double(), want, rtol=2e-5, atol=1e-9)


def test_softmax_of_rows_without_a_result(device):
    logits = torch.randn(5, 600, device=device)
    want = sampling.softmax(logits)
    logits[1], logits[2, 7], logits[3, 599] = -float("inf"), float("nan"), float("inf")
    out = sampling.softmax(logits)
    assert out[1:4].isnan().all() and out[[0, 4]].equal(want[[0, 4]])


def check_renormalised(out: torch.Tensor, x: torch.Tensor, cuts: list[float]) -> None:
    """Check that ``out`` is x over the sum of the elements that one of the thresholds keeps."""
    wide = torch.where(x > 0, x, 0.0).double()
    eps = torch.finfo(out.dtype).eps
    for cut in cuts:
        kept = torch.where(wide >= cut, wide, 0.0)
        want = kept / kept.sum().clamp(min=1e-300)
        near = (out.cpu().double() - want).abs() <= want * (2 * eps + 1e-6) + torch.finfo(out.dtype).tiny
        if near.all() and (out.cpu().double() > 0).sum() <= (kept > 0).sum():
            return
    raise AssertionError(f"{int((out > 0).sum())} are kept, of {len(x)}")


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_renormalised_rows(vocab_size, dtype, device):
    for kind in KINDS if vocab_size <= 5000 else ("normal", "zipf"):
        if kind == "subnormal" and dtype == torch.float16:
            continue
        x = rows_of(kind, 2, vocab_size).to(dtype)
        few = vocab_size > 5000
        for k in (
            {50, vocab_size // 3}
            if few
            else {1, 2, 50, max(vocab_size - 1, 1), vocab_size, vocab_size + 1, -1, max(vocab_size // 3, 1)}
        ):
            out = sampling.top_k_renorm_probs(x.to(device), k)
            assert out.dtype == dtype
            for row in range(2):
                cut = top_k_threshold(x[row].float(), k)
                check_renormalised(out[row], x[row], [cut])
        for p in (0.5, 0.9) if few else (0.0, 1e-6, 0.5, 0.9, 1 - 1e-7, 1.0, 1.5):
            out = sampling.top_p_renorm_probs(x.to(device), p)
            for row in range(2):
                wide = x[row].double()
                check_renormalised(out[row], x[row], top_p_thresholds(wide, p, 1e-6 * float(wide.sum())))


def test_renormalised_rows_without_mass(device, dtype):
    x = rows_of("normal", 4, 700).to(dtype)
    x[1], x[2, 3] = 0.0, float("nan")
    for out in (sampling.top_k_renorm_probs(x.to(device), 5), sampling.top_p_renorm_probs(x.to(device), 0.5)):
        assert out[1].eq(0).all() and out[2].isnan().all() and out[[0, 3]].float().sum(-1).sub(1).abs().max() < 0.02


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_masked_logits(vocab_size, dtype, device):
    logits = (torch.randn(5, vocab_size) * 3).to(dtype)
    logits[1, ::2], logits[2, 0], logits[3] = -float("inf"), float("nan"), logits[3, 0].clone()
    logits[4, : vocab_size // 2] = float("-inf")
    numbers = torch.tensor([1, 3, 5, 2, max(vocab_size // 3, 1)])
    for k in (1, 2, 40, max(vocab_size - 1, 1), vocab_size, -1, numbers):
        out = sampling.top_k_mask_logits(logits.to(device), k if isinstance(k, int) else k.to(device)).cpu()
        assert out.dtype == dtype
        for row in range(5):
            cut = top_k_threshold(logits[row].float(), k if isinstance(k, int) else int(k[row]))
            want = torch.where(logits[row].float() < cut, -float("inf"), logits[row].float()).to(dtype)
            torch.testing.assert_close(out[row], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_top_k(vocab_size, dtype, device):
    x = torch.randn(3, vocab_size).to(dtype)
    x[1] = x[1, 0].clone()
    for k in {1, min(50, vocab_size), max(vocab_size // 2, 1), vocab_size}:
        values, indices = sampling.top_k(x.to(device), k)
        assert values.dtype == dtype and indices.dtype == torch.int64
        assert x.gather(1, indices.cpu()).equal(values.cpu()) and (indices.diff(dim=-1) > 0).all()
        assert values.cpu().sort(-1, descending=True).values.equal(x.topk(k).values)
        assert indices[1].tolist() == list(range(k))
        assert sampling.top_k(x.to(device), k, sorted=True)[0].cpu().equal(x.topk(k).values)
        last, places = sampling.top_k(x.to(device), k, tie_break=2, dsa_graph_safe=True)
        assert last.cpu().sort(-1, descending=True).values.equal(x.topk(k).values)
        assert places[1].tolist() == list(range(vocab_size - k, vocab_size))
        assert x.gather(1, places.cpu()).equal(last.cpu()) and (places.diff(dim=-1) > 0).all()
