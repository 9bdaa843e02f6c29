"""Keys of MLA, concatenated from the part of each head and the part that all heads share."""

from __future__ import annotations

import torch

from ._ops.declare import define
from ._ops.numbers import check_option
from ._ops.route import without_gradient
from .jit.modules.concat_ops import gen_concat_ops_module

__all__ = ["concat_mla_k", "gen_concat_ops_module"]

_concat_mla_k = define(
    "concat_mla_k(Tensor(a!) k, Tensor k_nope, Tensor k_rope) -> ()",
    gen_concat_ops_module,
    fallback=without_gradient("concat_mla_k", "k", "k_nope", "k_rope"),
)


def concat_mla_k(k: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor, *, backend: str = "default") -> None:
    """Write keys of MLA in place: ``k[..., :dn] = k_nope``, and ``k[..., dn:] = k_rope`` for every head.

    Args:
        k: ``[T, H, dn + dr]``, bfloat16, float16, float8_e4m3fn or float8_e5m2; any strides of tokens and
            heads. ``dn`` and ``dr`` are multiples of 16 bytes; T may be 0.
        k_nope: ``[T, H, dn]`` of k's dtype; may be a view of a larger projection.
        k_rope: ``[T, 1, dr]`` of k's dtype; may be a view too.
        backend: ``"default"``.

    Raises:
        ValueError: invalid shapes, strides, devices or backend; ``k`` shares memory with an input.
        TypeError: invalid dtypes.
        GradientError: a tensor requires a gradient.

    Bytes are copied without rounding and without allocation. The host does not read the device.
    """
    check_option("concat_mla_k", "backend", backend, ("default",))
    _concat_mla_k(k, k_nope, k_rope)
