"""The operator of the gemm family: products of groups of rows, each with a matrix of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .._ops.declare import define
from .._ops.errors import renamed
from .._ops.route import without_gradient
from ..jit.modules.gemm import gen_gemm_module

GROUPED_GEMM = (
    "grouped_gemm(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? m_indptr, Tensor? m_counts,"
    " Tensor? b_indices, Tensor? a_rows, Tensor? row_scale, int granularity_m, int granularity_n, int granularity_k,"
    " bool sm90, int gate) -> ()"
)
# out[r] = row_scale[r] * (a[a_rows[r]] * a_scale) @ (b[b_indices[g]] * b_scale)^T for each row r of each group g. Rows of
# no group stay as they are. Groups are m_indptr[g] to m_indptr[g + 1]; or m_counts[g] rows from m_indptr[g] on; or so many
# of equal parts of the rows; or, without either, these parts. A granularity of 0 stands for one scale of the extent.
# sm90: the kernels for Hopper alone or an error; else they are taken where they serve.
# gate: 0, none; else b's rows are two halves, and out = silu(gate) * linear has half as many columns: 1, the linear half
# comes first; 2, the gate does. m_indptr is int32 then, and nothing has factors.
_grouped_gemm = define(
    GROUPED_GEMM,
    gen_gemm_module,
    lambda *_: None,
    general=without_gradient("grouped_gemm", "a", "b"),
    needs=lambda *_: {},
)


LINEAR_FIRST, GATE_FIRST = 1, 2


SAME_NAMES: Mapping[str, str] = MappingProxyType({})


def grouped_gemm(*args: Any, sm90: bool = False, gate: int = 0, names: Mapping[str, str] = SAME_NAMES) -> None:
    """Call the operator; most calls need no other last arguments.

    Args:
        names: an argument of the operator -> the name that the public function has for it.
    """
    try:
        _grouped_gemm(*args, sm90, gate)
    except (ValueError, TypeError) as err:
        raise renamed(err, names) from None
