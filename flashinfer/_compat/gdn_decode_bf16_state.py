"""Verification of draft tokens: the function of :mod:`flashinfer.gdn_kernels.gdn_decode_bf16_state`."""

from __future__ import annotations

import torch

from .._ops.arguments import check_present
from .._ops.numbers import check_option
from .gdn_decode import gated_delta_rule_mtp as _mtp

__all__ = ["gated_delta_rule_mtp"]

_NAME = "gated_delta_rule_mtp"


def gated_delta_rule_mtp(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of :func:`flashinfer.gdn_decode.gated_delta_rule_mtp`.

    Args:
        softplus_beta, softplus_threshold: 1 and 20. Softplus has no other form here: above 20 it equals its
            argument in float32.
        q, k, v, b, initial_state_source, initial_state_indices: required; ``initial_state_source`` is the
            pool.
        use_qk_l2norm_in_kernel: ``use_qk_l2norm`` of the other function.
        others: as there.

    Raises:
        ValueError: another beta or threshold, or a missing tensor.
        TypeError: as the other function.
    """
    check_option(_NAME, "softplus_beta", softplus_beta, (1.0,))
    check_option(_NAME, "softplus_threshold", softplus_threshold, (20.0,))
    required = dict(
        q=q, k=k, v=v, b=b, initial_state_source=initial_state_source, initial_state_indices=initial_state_indices
    )
    for name, tensor in required.items():
        check_present(_NAME, name, tensor, "Tensor")
    assert q is not None and k is not None and v is not None and b is not None
    assert initial_state_source is not None and initial_state_indices is not None
    out, _ = _mtp(
        q, k, v, initial_state_source, initial_state_indices, A_log, a, dt_bias, b, scale, output,
        intermediate_states_buffer, disable_state_update=disable_state_update, use_qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out
