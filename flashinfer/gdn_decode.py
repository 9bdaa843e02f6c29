"""Steps of Gated DeltaNet's decoding under FlashInfer's names.

They call :func:`flashinfer.delta_rule.delta_rule_step` with raw gates. The kernel computes
``g = -exp(A_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``.
"""

from __future__ import annotations

from ._compat.gdn_decode import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)

__all__ = [
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
]
