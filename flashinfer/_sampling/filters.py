"""Functions of rows without draws: softmax, renormalised and masked rows."""

from __future__ import annotations

import torch

from . import operators
from .parameters import Integer, Real, check_rows, integer_of, real_of, traced


def softmax(logits: torch.Tensor, temperature: Real | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """Compute ``softmax(logits / temperature)`` along the last dimension, in float32.

    Args:
        logits: ``[batch_size, vocab_size]``.
        temperature: ``None`` means 1. At 0 all maxima of a row have the same probability, and other elements 0.
        enable_pdl: let the kernel start while the preceding kernel ends (CUDA). ``None``: if the device supports it.

    Returns:
        ``[batch_size, vocab_size]`` float32; NaN in rows with a NaN and in rows of -inf, like
        ``torch.softmax``.
    """
    check_rows("softmax", "logits", logits)
    number = real_of(
        "softmax", "temperature", 1.0 if temperature is None else temperature, logits.shape[0], logits.shape[0]
    )
    return operators.softmax(logits, *traced(number, logits.device), enable_pdl)  # type: ignore[no-any-return]


def top_p_renorm_probs(probs: torch.Tensor, top_p: Real, is_deterministic: bool = False) -> torch.Tensor:
    """Keep the probabilities within ``top_p`` and divide them by their sum. Others become 0.

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        top_p: 1 and more keep all; 0 and less keep the most probable.

    Returns:
        A tensor of ``probs``' shape and dtype; NaN in rows with a NaN, 0 in rows without mass.
    """
    check_rows("top_p_renorm_probs", "probs", probs)
    number = real_of("top_p_renorm_probs", "top_p", top_p, probs.shape[0], probs.shape[0])
    return operators.top_p_renorm_probs(probs, *traced(number, probs.device))  # type: ignore[no-any-return]


def top_k_renorm_probs(probs: torch.Tensor, top_k: Integer, is_deterministic: bool = False) -> torch.Tensor:
    """Keep the ``top_k`` largest probabilities and divide them by their sum. Others become 0.

    Args:
        probs: ``[batch_size, vocab_size]``; negative numbers count as 0.
        top_k: negative numbers, and the vocabulary's size and more, keep all; 0 counts as 1.

    Returns:
        A tensor of ``probs``' shape and dtype; NaN in rows with a NaN, 0 in rows without mass.
    """
    check_rows("top_k_renorm_probs", "probs", probs)
    number = integer_of("top_k_renorm_probs", "top_k", top_k, probs.shape[0], probs.shape[0])
    return operators.top_k_renorm_probs(probs, *number)  # type: ignore[no-any-return]


def top_k_mask_logits(logits: torch.Tensor, top_k: Integer) -> torch.Tensor:
    """Keep the ``top_k`` largest logits of each row and those that tie with the last of them.

    Others become -inf.

    Args:
        logits: ``[batch_size, vocab_size]``; NaN stays and is not counted.
        top_k: negative numbers, and the vocabulary's size and more, keep all; 0 counts as 1.

    Returns:
        A tensor of ``logits``' shape and dtype.
    """
    check_rows("top_k_mask_logits", "logits", logits)
    number = integer_of("top_k_mask_logits", "top_k", top_k, logits.shape[0], logits.shape[0])
    return operators.top_k_mask_logits(logits, *number)  # type: ignore[no-any-return]
