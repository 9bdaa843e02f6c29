"""Helpers that engines import from FlashInfer's module of this name."""

from __future__ import annotations

from .._ops.numbers import positive, whole

__all__ = ["get_hybrid_num_tokens_buckets"]

# Batches of decode double. Batches of prefill differ by less than an octave, so steps are equal from here on.
_EQUAL_STEPS = 256


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Return the numbers of tokens, ascending, that an engine passes to :func:`flashinfer.autotune`.

    They are powers of two up to 256, then multiples of 256 up to 2,048, then powers of two, and the maximum.

    Raises:
        ValueError: a minimum below 1, or a maximum below the minimum.
    """
    name = "get_hybrid_num_tokens_buckets"
    whole(name, "max_num_tokens", max_num_tokens, positive(name, "min_num_tokens", min_num_tokens))
    powers = (1 << exponent for exponent in range(max_num_tokens.bit_length()))
    buckets = {*powers, *range(_EQUAL_STEPS, 2049, _EQUAL_STEPS), min_num_tokens, max_num_tokens}
    return tuple(sorted(size for size in buckets if min_num_tokens <= size <= max_num_tokens))
