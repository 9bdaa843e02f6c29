"""Keys of MLA put together from the part that each head has and the part that all heads share."""

from __future__ import annotations

import torch

from ._ops.declare import define
from ._ops.route import without_gradient
from .jit.modules.concat_ops import gen_concat_ops_module

__all__ = ["concat_mla_k", "gen_concat_ops_module"]

_concat_mla_k = define(
    "concat_mla_k(Tensor(a!) k, Tensor k_nope, Tensor k_rope) -> ()",
    gen_concat_ops_module,
    lambda *_: None,
    general=without_gradient("concat_mla_k", "k", "k_nope", "k_rope"),
)


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Write keys of MLA in place: ``k[..., :dn] = k_nope`` and ``k[..., dn:] = k_rope``, the latter for every head.

    Args:
        k: ``[T, H, dn + dr]``, bfloat16, float16, float8_e4m3fn or float8_e5m2; any strides of tokens and heads. ``dn``
            and ``dr`` are multiples of 16 bytes; T may be 0.
        k_nope: ``[T, H, dn]`` of k's dtype; may be a view of a larger projection.
        k_rope: ``[T, 1, dr]`` of k's dtype; likewise.
        backend: ``"default"``.

    Raises:
        ValueError: shapes, strides, devices or a backend that do not fit; ``k`` shares memory with an input.
        TypeError: dtypes that do not fit.
        GradientError: a tensor wants a gradient.

    The keys are bytes that move: no rounding, no allocation, no look at the device.
    """
    if backend != "default":
        raise ValueError(f"concat_mla_k: backend: got {backend!r}, wanted 'default'")
    _concat_mla_k(k, k_nope, k_rope)
