"""The delta rule in float64, token by token, and inputs that reveal errors of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: Any = None, gk: Any = None, beta: Any = None,
    initial_state: Any = None, scale: float = 1.0, l2norm: bool = False, lengths: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return ``(o, final_state)`` in float64. ``lengths``: sequences are packed, one after another, in a batch of 1."""
    if lengths is not None:
        start, parts = 0, []
        for n, length in enumerate(lengths):
            at = slice(start, start + length)
            given = [None if one is None else one[:, at] for one in (q, k, v, g, gk, beta)]
            state = None if initial_state is None else initial_state[n : n + 1]
            parts.append(delta_rule(*given, state, scale, l2norm))
            start += length
        return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    rows = []
    for t in range(q.shape[1]):
        decay = v.new_zeros(()) if g is None else g[:, t, :, None, None]
        state = state * (decay if gk is None else decay + gk[:, t, :, :, None]).exp()
        residual = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        factor = 1 if beta is None else beta[:, t] if beta.dim() == 4 else beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], factor * residual)
        rows.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1) if rows else v.new_empty(v.shape), state


def inputs(
    dtype: torch.dtype, device: str, batch: int = 2, tokens: int = 131, heads: int = 2, value_heads: int = 6, key_dim: int = 48,
    value_dim: int = 80, sequences: int | None = None, gate: bool = True, row_gate: bool = False, vector: bool = False,
    alike: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return arguments by name. Keys are unit vectors, and decays are near 1 except for a few resets. States therefore
    persist and stay small. The last head has no reset, so its initial state affects its last token.

    ``alike``: keys are noisy copies of one vector, as after an activation, and beta reaches 2.
    """
    wide: dict[str, Any] = dict(device=device, dtype=torch.float64)
    q, k = (torch.randn(batch, tokens, heads, key_dim, **wide) for _ in range(2))
    q = q + 0.1 * q.sign()  # keeps queries of one dimension away from zero
    if alike:
        k = torch.randn(batch, 1, heads, key_dim, **wide) + 0.3 * k
    k = k / k.norm(dim=-1, keepdim=True)
    heads_of_values = batch, tokens, value_heads
    given = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(*heads_of_values, value_dim, **wide).to(dtype),
        "beta": (2 if alike else 1) * torch.rand(*heads_of_values, *((value_dim,) if vector else ()), **wide),
        "initial_state": torch.randn(
            batch if sequences is None else sequences, value_heads, key_dim, value_dim, **wide
        ),
    }
    if gate:
        resets = torch.rand(heads_of_values, **wide) < 0.01
        resets[..., -1] = False
        given["g"] = (-0.02 * torch.rand(heads_of_values, **wide)).masked_fill(resets, -30.0)
    if row_gate:
        given["gk"] = -0.05 * torch.rand(*heads_of_values, key_dim, **wide)
    numbers = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: one if name in "qkv" else one.to(numbers) for name, one in given.items()}


def chunk_bound(given: dict[str, torch.Tensor], alike: bool = False) -> float | None:
    """Return the error bound of a head's output and state, or ``None`` if the call rounds no operands.

    Tensor cores multiply chunks of half types with rounded operands. Similar keys (``alike``) amplify the rounding.
    """
    q = given["q"]
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    return (2e-2 if alike else 8e-3) / (8 if q.dtype == torch.float16 else 1)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative root mean square error of a part ``[a, b]`` of a tensor ``[a, b, ...]``."""
    assert got.shape == want.shape
    if not want.numel():
        return 0.0
    got, want = got.detach().double().cpu(), want.detach().cpu()
    dims = tuple(range(2, want.dim())) or (1,)
    rms = want.square().mean(dims).sqrt()
    return float(((got - want).square().mean(dims).sqrt() / (rms + 0.05 * want.square().mean().sqrt() + 1e-300)).max())
