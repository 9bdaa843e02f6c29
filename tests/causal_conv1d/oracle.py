"""The causal convolution in float64, by sums over shifted copies of each sequence."""

from __future__ import annotations

import torch


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    silu: bool,
    lengths: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x``: ``[B, channels, T]``. Returns the result and the final states, ``[N, channels, width - 1]``."""
    pieces = list(x.unbind(0)) if lengths is None else list(x[0].split(lengths, dim=-1))
    before = weight.shape[1] - 1
    outs, states = [], []
    for number, piece in enumerate(pieces):
        past = piece.new_zeros(piece.shape[0], before) if initial is None else initial[number]
        times = torch.cat([past, piece], dim=-1)
        count = piece.shape[-1]
        y = sum(weight[:, j, None] * times[:, j : j + count] for j in range(before + 1))
        y = y if bias is None else y + bias[:, None]
        outs.append(y * y.sigmoid() if silu else y)
        states.append(times[:, times.shape[-1] - before :])
    out = torch.stack(outs) if lengths is None else torch.cat(outs, dim=-1)[None]
    return out, torch.stack(states)


def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().cpu().double()


def magnitude(*given: torch.Tensor | None, lengths: list[int] | None) -> torch.Tensor:
    """Return the sum of the absolute terms of each result, as the unit of rounding errors."""
    sizes = [None if one is None else wide(one).abs() for one in given]
    return convolve(*sizes, False, lengths)[0]
