"""FlashInfer's address of functions that it also has in Triton. They are this library's own kernels."""

from __future__ import annotations

from . import activation as activation
from . import cascade as cascade
from . import norm as norm
from . import sm_constraint_gemm as sm_constraint_gemm

__all__ = ["activation", "cascade", "norm", "sm_constraint_gemm"]
