"""Sampling of tokens: softmax, filters, draws, and the verification of draft tokens.

A row is ``x >= 0``: probabilities, or ``softmax(logits)`` in float32. Every filter keeps
``{i : x_i >= t, x_i > 0}`` for one threshold ``t`` of the row, so ties are kept whole. A sample is the
smallest ``i`` with ``sum(kept x_j, j <= i) > u * sum(kept x)`` for one uniform ``u`` of 53 bits. It depends
only on the row, the threshold and ``u``. Rows need not sum to 1.

``u`` comes from Philox4x32-10 with the key ``seed`` and the counter ``(offset, slot)``. ``slot`` is the index
of the output by default. With ``slot=0`` and a seed for each output, a request draws the same tokens in any
batch. Without ``seed``, seed and offset come from ``generator``, or from torch's default one. Sums have a
fixed order, so results are the same in every run and batch; ``deterministic`` is accepted and unused.
``seed`` and ``offset`` are integers modulo 2^64, or int64 or uint64 tensors ``[1]`` or ``[num_outputs]`` on
the device.

All functions share these rules. Rows are float32, float16 or bfloat16, with any stride between rows.
``indices`` ``[num_outputs]`` (int32 or int64) names the row of each output. Samples have its dtype, or int32
without it. A parameter is a number, or a tensor ``[num_outputs]`` or ``[batch_size]`` that the host never
reads. An invalid row gives token 0, and False in ``valid`` with ``return_valid``. Rows are invalid with a
NaN, without mass, with a parameter that is NaN, and on CUDA with an index outside of the batch. ``check_nan``
raises ``ValueError`` for a NaN instead, and waits for the device. Invalid shapes, devices and lengths raise
``ValueError``, invalid dtypes ``TypeError``, on the CPU an index outside of the batch ``IndexError``.
"""

from __future__ import annotations

import torch

from ._ops.numbers import check_option
from ._sampling.draws import Draws, Samples, draw
from ._sampling.filters import softmax, top_k_mask_logits, top_k_renorm_probs, top_p_renorm_probs
from ._sampling.parameters import Integer, Real
from ._sampling.random import Word
from ._sampling.speculation import chain_speculative_sampling
from ._sampling.top_k import TopKTieBreak, top_k
from ._sampling.transforms import top_k_page_table_transform, top_k_ragged_transform
from .jit.modules.sampling import gen_sampling_module

__all__ = [
    "TopKTieBreak",
    "chain_speculative_sampling",
    "gen_sampling_module",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k",
    "top_k_mask_logits",
    "top_k_page_table_transform",
    "top_k_ragged_transform",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]


def _is_top_k_first(op: str, filter_apply_order: str) -> bool:
    if filter_apply_order == "top_k_first":
        return True
    check_option(op, "filter_apply_order", filter_apply_order, ("top_k_first", "joint"))
    return False


def sampling_from_logits(
    logits: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
) -> torch.Tensor:
    """Draw a token from ``softmax(logits)`` of each output's row.

    Args:
        logits: ``[batch_size, vocab_size]``.
        indices, generator, check_nan, seed, offset, slot: see the module's description.

    Returns:
        samples ``[num_outputs]``.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot)
    return draw("sampling_from_logits", "logits", logits, draws)  # type: ignore[return-value]


def sampling_from_probs(
    probs: torch.Tensor,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
    return_valid: bool = False,
) -> Samples:
    """Draw a token with probability ``probs / sum(probs)`` for each output.

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        indices, generator, check_nan, seed, offset, slot, return_valid: see the module's description.

    Returns:
        samples ``[num_outputs]``, or ``(samples, valid)`` with ``valid`` ``[num_outputs]`` bool.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot, return_valid)
    return draw("sampling_from_probs", "probs", probs, draws)


def top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
    return_valid: bool = False,
) -> Samples:
    """Draw from the smallest set of most probable tokens with the mass ``top_p``.

    This is nucleus sampling (Holtzman et al. 2019).

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        top_p: 1 and more keep all; 0 and less keep the most probable.
        indices, generator, check_nan, seed, offset, slot, return_valid: see the module's description.

    Returns:
        samples ``[num_outputs]``, or ``(samples, valid)`` with ``valid`` ``[num_outputs]`` bool.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot, return_valid)
    return draw("top_p_sampling_from_probs", "probs", probs, draws, top_p=top_p)


def top_k_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Integer,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
    return_valid: bool = False,
) -> Samples:
    """Draw from the ``top_k`` most probable tokens, and those that tie with the last of them.

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        top_k: negative numbers, and the vocabulary's size and more, keep all; 0 counts as 1.
        indices, generator, check_nan, seed, offset, slot, return_valid: see the module's description.

    Returns:
        samples ``[num_outputs]``, or ``(samples, valid)`` with ``valid`` ``[num_outputs]`` bool.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot, return_valid)
    return draw("top_k_sampling_from_probs", "probs", probs, draws, top_k=top_k)


def min_p_sampling_from_probs(
    probs: torch.Tensor,
    min_p: Real,
    indices: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
    return_valid: bool = False,
) -> Samples:
    """Draw from the tokens with at least ``min_p`` times the largest probability (Nguyen et al. 2024).

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        min_p: 0 and less keep all; 1 and more keep the most probable.
        indices, generator, check_nan, seed, offset, slot, return_valid: see the module's description.

    Returns:
        samples ``[num_outputs]``, or ``(samples, valid)`` with ``valid`` ``[num_outputs]`` bool.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot, return_valid)
    return draw("min_p_sampling_from_probs", "probs", probs, draws, min_p=min_p)


def top_k_top_p_sampling_from_logits(
    logits: torch.Tensor,
    top_k: Integer,
    top_p: Real,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
) -> torch.Tensor:
    """Draw from the tokens of ``softmax(logits)`` that pass both filters.

    Args:
        logits: ``[batch_size, vocab_size]``.
        top_k: negative numbers, and the vocabulary's size and more, keep all; 0 counts as 1.
        top_p: 1 and more keep all; 0 and less keep the most probable.
        filter_apply_order: ``"top_k_first"`` samples like :func:`top_k_mask_logits`, :func:`softmax` and then
            :func:`top_p_sampling_from_probs`, so ``top_p`` is relative to the mass after ``top_k``. With
            ``"joint"`` it is relative to the whole row.
        indices, generator, check_nan, seed, offset, slot: see the module's description.

    Returns:
        samples ``[num_outputs]``.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot)
    return draw(
        "top_k_top_p_sampling_from_logits",
        "logits",
        logits,
        draws,
        top_k=top_k,
        top_p=top_p,
        top_k_first=_is_top_k_first("top_k_top_p_sampling_from_logits", filter_apply_order),
    )  # type: ignore[return-value]


def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: Integer,
    top_p: Real,
    indices: torch.Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
    return_valid: bool = False,
) -> Samples:
    """Draw from the tokens that pass both filters.

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        top_k: negative numbers, and the vocabulary's size and more, keep all; 0 counts as 1.
        top_p: 1 and more keep all; 0 and less keep the most probable.
        filter_apply_order: with ``"top_k_first"`` ``top_p`` is relative to the mass after ``top_k``, with
            ``"joint"`` to the whole row.
        indices, generator, check_nan, seed, offset, slot, return_valid: see the module's description.

    Returns:
        samples ``[num_outputs]``, or ``(samples, valid)`` with ``valid`` ``[num_outputs]`` bool.
    """
    draws = Draws(indices, generator, check_nan, seed, offset, slot, return_valid)
    return draw(
        "top_k_top_p_sampling_from_probs",
        "probs",
        probs,
        draws,
        top_k=top_k,
        top_p=top_p,
        top_k_first=_is_top_k_first("top_k_top_p_sampling_from_probs", filter_apply_order),
    )


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs
