"""Helpers that engines import from FlashInfer's module of this name."""

from __future__ import annotations

__all__ = ["get_hybrid_num_tokens_buckets"]

# Batches of decode double. Batches of prefill differ by less than an octave, so steps are equal from here on.
_EQUAL_STEPS = 256


def get_hybrid_num_tokens_buckets(max_num_tokens: int, min_num_tokens: int = 1) -> tuple[int, ...]:
    """Return numbers of tokens that stand for all up to ``max_num_tokens``, in ascending order.

    They are powers of two up to 256, then multiples of 256 up to 2,048, then powers of two, and the maximum. An engine
    gives them to :func:`flashinfer.autotune`.

    Raises:
        ValueError: a minimum below 1, or a maximum below the minimum.
    """
    if not 1 <= min_num_tokens <= max_num_tokens:
        raise ValueError(
            f"get_hybrid_num_tokens_buckets: got min_num_tokens {min_num_tokens} and max_num_tokens {max_num_tokens}, "
            "wanted 1 <= min_num_tokens <= max_num_tokens"
        )
    powers = (1 << exponent for exponent in range(max_num_tokens.bit_length()))
    buckets = {*powers, *range(_EQUAL_STEPS, 2049, _EQUAL_STEPS), min_num_tokens, max_num_tokens}
    return tuple(sorted(size for size in buckets if min_num_tokens <= size <= max_num_tokens))
