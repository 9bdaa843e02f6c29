"""Factors of logits and outputs per query head, from scales of 8-bit queries, keys and values."""

from __future__ import annotations

import itertools

import pytest
import torch

from flashinfer._attention.scales import head_scales

QO_HEADS, KV_HEADS = 6, 3


def spread(scale: float | torch.Tensor | None) -> list[float]:
    """Return a number for each query head, computed in Python."""
    if scale is None or isinstance(scale, float):
        return [1.0 if scale is None else scale] * QO_HEADS
    values = scale.flatten().tolist()
    return [values[head * len(values) // QO_HEADS] for head in range(QO_HEADS)]


def kinds(heads: int, device: str) -> list[float | torch.Tensor | None]:
    values = torch.rand(heads, device=device) + 0.5
    return [None, 0.75, values[:1], values, values.bfloat16(), torch.stack([values, values], 1)[:, 0]]


def test_every_combination_of_kinds_of_scales(device):
    for scales in itertools.product(kinds(QO_HEADS, device), kinds(KV_HEADS, device), kinds(KV_HEADS, device)):
        q_scale, k_scale, v_scale = scales
        logits, outputs, by_head = head_scales(
            "op", (q_scale, k_scale, v_scale), QO_HEADS, KV_HEADS, torch.device(device)
        )
        got = torch.tensor([[logits] * QO_HEADS, [outputs] * QO_HEADS])
        if by_head is not None:
            assert by_head.shape == (2, QO_HEADS) and by_head.dtype == torch.float32 and by_head.is_contiguous()
            got = got * by_head.cpu()
        products = [q * k for q, k in zip(spread(q_scale), spread(k_scale), strict=True)]
        torch.testing.assert_close(got, torch.tensor([products, spread(v_scale)]), rtol=1e-6, atol=0)


def test_a_scale_of_another_length_is_refused(device):
    wrong = torch.ones(KV_HEADS + 1, device=device)
    for name, scales in {"q": (wrong, None, None), "k": (None, wrong, None), "v": (1.0, None, wrong)}.items():
        for op, argument in (("op", f"{name}_scale"), ("single_prefill_with_kv_cache", f"scale_{name}")):
            with pytest.raises(ValueError, match=rf"{op}: {argument}: got shape \[4\], wanted one number or"):
                head_scales(op, scales, QO_HEADS, KV_HEADS, torch.device(device))


def test_heads_that_do_not_divide_are_left_to_the_operator(device):
    scale = torch.ones(KV_HEADS, device=device)
    assert head_scales("op", (None, scale, scale), QO_HEADS + 1, KV_HEADS, torch.device(device)) == (1.0, 1.0, None)
