"""Function that draws samples from rows. All sampling functions call it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import operators
from .parameters import Integer, Real, check_rows, integer_of, real_of, refuse_nan, traced
from .random import Word, random_of

Samples = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Draws(NamedTuple):
    """Arguments of a function that draws, in addition to its rows and filters."""

    indices: torch.Tensor | None
    generator: torch.Generator | None
    check_nan: bool
    seed: Word
    offset: Word
    slot: Word
    return_valid: bool = False


def draw(
    op: str,
    name: str,
    rows: torch.Tensor,
    draws: Draws,
    *,
    temperature: Real = 1.0,
    top_k: Integer = -1,
    top_p: Real = 1.0,
    min_p: Real = 0.0,
    top_k_first: bool = False,
) -> Samples:
    """Check the arguments of ``op`` and draw. ``name`` is the kind of the rows, ``logits`` or ``probs``."""
    check_rows(op, name, rows)
    outputs = count = rows.shape[0]
    if draws.indices is not None:
        check_rows(op, "indices", draws.indices, 1)
        outputs = draws.indices.shape[0]
    if draws.check_nan:
        refuse_nan(name, rows)
    samples, valid = operators.sample_from_rows(
        rows,
        name == "logits",
        *traced(real_of(op, "temperature", temperature, count, outputs), rows.device),
        *integer_of(op, "top_k", top_k, count, outputs),
        *traced(real_of(op, "top_p", top_p, count, outputs), rows.device),
        *traced(real_of(op, "min_p", min_p, count, outputs), rows.device),
        top_k_first,
        draws.indices,
        *random_of(op, rows.device, outputs, draws.generator, draws.seed, draws.offset, draws.slot),
    )
    return (samples, valid) if draws.return_valid else samples
