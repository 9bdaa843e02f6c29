"""Seed and offset of a call's random numbers, from the caller or from a generator."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from .._ops.errors import called, type_error, value_error

_BITS = 2**64
Word = int | torch.Tensor | None  # of 64 bits


class Random(NamedTuple):
    """Arguments of operators that draw: three numbers, each as a tensor or as a number."""

    seed: torch.Tensor | None
    seed_value: int
    offset: torch.Tensor | None
    offset_value: int
    slot: torch.Tensor | None
    slot_value: int  # -1: the index of the output


def random_of(
    op: str,
    device: torch.device,
    outputs: int,
    generator: torch.Generator | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    slot: int | torch.Tensor | None,
) -> Random:
    """Check the caller's numbers, and draw the missing ones from a generator."""
    slots = _list(op, "slot", slot, outputs) if isinstance(slot, torch.Tensor) else None
    slot_value = -1 if slot is None or slots is not None else _number(op, "slot", slot) % 2**32
    if seed is None:
        if offset is not None:
            raise value_error(op, "offset", "an offset without a seed", "both or neither")
        try:
            other = None if generator is None or generator.device.type == device.type else generator.device
        except AttributeError:
            raise type_error(op, "generator", type(generator).__name__, "torch.Generator") from None
        if other is not None:
            raise value_error(op, "generator", f"one of {other}", f"one of {device}")
        return _drawn(device, generator)._replace(slot=slots, slot_value=slot_value)
    if generator is not None:
        raise value_error(op, "generator", "a generator together with a seed", "one of the two")
    if offset is None:
        offset = torch.zeros_like(seed) if isinstance(seed, torch.Tensor) else 0
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor):
        return Random(_list(op, "seed", seed, outputs), 0, _list(op, "offset", offset, outputs), 0, slots, slot_value)
    if isinstance(seed, torch.Tensor) or isinstance(offset, torch.Tensor):
        got = f"{type(offset).__name__} with a seed of {type(seed).__name__}"
        text = "seed and offset must both be tensors or both be scalars"
        raise ValueError(f"{called(op)}: offset: got {got}: {text}")
    return Random(None, _signed(op, "seed", seed), None, _signed(op, "offset", offset), slots, slot_value)


def _drawn(device: torch.device, generator: torch.Generator | None) -> Random:
    if device.type == "cuda" and not is_compiling() and not torch.cuda.is_current_stream_capturing():
        index = torch.cuda.current_device() if device.index is None else device.index
        source = torch.cuda.default_generators[index] if generator is None else generator
        offset = source.get_offset()
        source.set_offset(offset + 4)
        return Random(None, _signed("", "seed", source.initial_seed()), None, offset, None, -1)
    # A graph draws anew in each run, on the device. The CPU's generator has no offset.
    words = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device)
    return Random(words[:1], 0, words[1:], 0, None, -1)


def _list(op: str, name: str, given: torch.Tensor, outputs: int) -> torch.Tensor:
    if given.dtype == torch.uint64:
        given = given.view(torch.int64)
    if given.dtype != torch.int64:
        raise type_error(op, name, given.dtype, "torch.int64 or torch.uint64")
    if given.dim() != 1 or given.shape[0] not in (1, outputs):
        raise value_error(op, name, f"shape {list(given.shape)}", f"[1] or [{outputs}]")
    return given


def _number(op: str, name: str, given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int | torch.SymInt):
        raise type_error(op, name, type(given).__name__, "int or Tensor")
    return given  # type: ignore[return-value]


def _signed(op: str, name: str, given: object) -> int:
    """Return an integer modulo 2^64 as an int64."""
    number = _number(op, name, given)
    if not is_compiling() and not -(2**63) <= number < 2**63:
        number = (number + 2**63) % _BITS - 2**63
    return number
