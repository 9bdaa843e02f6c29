"""Sampling of tokens: softmax, filters, draws, and the verification of speculated tokens.

A row is ``x >= 0``: probabilities, or ``softmax(logits)`` in float32. Every filter keeps ``{i : x_i >= t, x_i > 0}`` for one
threshold ``t`` of the row, so ties are kept whole. A sample is the smallest ``i`` with ``sum(kept x_j, j <= i) > u * sum(kept x)``
for one uniform ``u`` of 53 bits: a function of the row, the threshold and ``u`` alone. Rows need not sum to 1.

``u`` comes from Philox4x32-10: the key is ``seed``, the counter ``(offset, slot)``, where ``slot`` is the number of the output, or what the
caller gives. With ``slot=0`` and a seed for each output, a request draws the same tokens in any batch. Without ``seed`` both come from
``generator``, or torch's default one. Sums have a fixed order, so results are the same in every run and batch; ``deterministic`` is
accepted and changes nothing. ``seed`` and ``offset`` are integers modulo 2^64, or int64 or uint64 tensors ``[1]`` or ``[num_outputs]`` on the device.

What all functions here share: rows are float32, float16 or bfloat16, read as they are, with any stride between rows. ``indices``
``[num_outputs]`` (int32 or int64) names the row of each output, and samples have its dtype, else int32. A parameter is a number,
or a tensor ``[num_outputs]`` or ``[batch_size]``, never read by the host. A row that cannot be drawn from (a NaN, no mass, a parameter
that is NaN, on CUDA an index outside of the batch) gives token 0, and False in ``valid`` where ``return_valid`` asks for it. ``check_nan``
raises ``ValueError`` for a NaN instead, and waits for the device. ``ValueError`` is raised for shapes, devices and lengths that do not
fit, ``TypeError`` for dtypes, on the CPU ``IndexError`` for an index outside of the batch.
"""

from __future__ import annotations

import torch

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


def _is_top_k_first(filter_apply_order: str) -> bool:
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(f"Invalid filter_apply_order: {filter_apply_order}")
    return filter_apply_order == "top_k_first"


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
        probs: ``[batch_size, vocab_size]``; what is negative counts as 0.
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
    """Draw from the fewest most probable tokens whose mass is ``top_p`` of the row (nucleus sampling, Holtzman et al. 2019).

    Args:
        probs: ``[batch_size, vocab_size]``; what is negative counts as 0.
        top_p: 1 and more keep all; 0 and less the most probable.
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
        probs: ``[batch_size, vocab_size]``; what is negative counts as 0.
        top_k: negative, or the vocabulary's size and more, keeps all; 0 counts as 1.
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
        probs: ``[batch_size, vocab_size]``; what is negative counts as 0.
        min_p: 0 and less keep all; 1 and more the most probable.
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
    """Draw from what both filters keep of ``softmax(logits)``.

    Args:
        logits: ``[batch_size, vocab_size]``.
        top_k: negative, or the vocabulary's size and more, keeps all; 0 counts as 1.
        top_p: 1 and more keep all; 0 and less the most probable.
        filter_apply_order: ``"top_k_first"``: the samples of :func:`top_p_sampling_from_probs` after :func:`top_k_mask_logits` and
            :func:`softmax`, so ``top_p`` is relative to what ``top_k`` keeps; ``"joint"``: to the whole row.
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
        top_k_first=_is_top_k_first(filter_apply_order),
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
    """Draw from what both filters keep.

    Args:
        probs: ``[batch_size, vocab_size]``; what is negative counts as 0.
        top_k: negative, or the vocabulary's size and more, keeps all; 0 counts as 1.
        top_p: 1 and more keep all; 0 and less the most probable.
        filter_apply_order: ``"top_k_first"``: ``top_p`` is relative to what ``top_k`` keeps; ``"joint"``: to the whole row.
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
        top_k_first=_is_top_k_first(filter_apply_order),
    )


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs
