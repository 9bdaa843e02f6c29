"""Operator of the gemm family: products of groups of rows, each with its own matrix."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .._ops.declare import define
from .._ops.errors import call_as
from .._ops.route import without_gradient
from ..jit.modules.gemm import gen_gemm_module

GROUPED_GEMM = (
    "grouped_gemm(Tensor(a!) out, Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? m_indptr, Tensor? m_counts,"
    " Tensor? b_indices, Tensor? a_rows, Tensor? row_scale, int granularity_m, int granularity_n, int granularity_k,"
    " int arch, int gate) -> ()"
)
# out[r] = row_scale[r] * (a[a_rows[r]] * a_scale) @ (b[b_indices[g]] * b_scale)^T for each row r of each
# group g. Rows without a group stay unchanged. Group g has the rows m_indptr[g] to m_indptr[g + 1]; with
# m_counts, m_counts[g] rows from m_indptr[g] on. Without m_indptr groups are equal parts, of which the first
# m_counts[g] rows count. A granularity of 0 means one scale for the whole extent.
# arch: 90 for the kernels of 9.0a or an error; 0 for those of any arch that serve the call, else the portable ones.
# gate: 0 for none. Otherwise b's rows are two halves, and out = silu(gate) * linear has half as many columns.
# 1: the linear half comes first; 2: the gate does. m_indptr is int32 then, and there are no factors.
_grouped_gemm = define(
    GROUPED_GEMM,
    gen_gemm_module,
    fallback=without_gradient("grouped_gemm", "a", "b"),
    needs=lambda *_: {},
)


LINEAR_FIRST, GATE_FIRST = 1, 2
SAME_NAMES: Mapping[str, str] = MappingProxyType({})


def grouped_gemm(*args: Any, arch: int = 0, gate: int = 0, names: Mapping[str, str] = SAME_NAMES) -> None:
    """Call the operator with defaults for its last arguments.

    Args:
        names: an argument of the operator -> its name in the public function.
    """
    call_as(names, _grouped_gemm, *args, arch, gate)
