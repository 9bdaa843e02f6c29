"""Operator for planned runs under ``torch.compile``. Its arguments are the plan's values and sizes.

A graph with a module's own ``run`` would be specialised to one plan's numbers and kernels. This operator selects the
module when the graph runs, so one graph serves all plans of a wrapper. The call allocates memory for partial states:
a workspace would be a mutated input, which the CUDA graphs of ``torch.compile`` do not support.
"""

from __future__ import annotations

from typing import Any

import torch

from .._ops.declare import define_in_python
from .kernels import KERNELS_BY_NUMBER
from .operators import builtin_operators
from .signature import CallArguments, Parameters, schema_of


def _attend_planned(
    family: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    num_queries: int,
    kv_size: int,
    kernels: int,
    *arguments_and_parameters: Any,
) -> None:
    arguments = CallArguments(*arguments_and_parameters[: len(CallArguments._fields)])
    parameters = arguments_and_parameters[len(arguments) :]
    got = k.shape[0] if k.dim() == 4 else k.shape[arguments.kv_layout]
    # Unbacked sizes of a graph have not been compared with the plan's.
    if q.shape[0] < num_queries or got < kv_size:
        raise ValueError(
            f"{op}: q, k: got {q.shape[0]} queries and {got} rows or pages of keys,"
            f" wanted at least {num_queries} and {kv_size} as the plan has"
        )
    heads = k.shape[k.dim() - 2 - arguments.kv_layout]
    if arguments.max_slots:
        size = arguments.max_slots * heads * arguments.slot_rows * (v.shape[-1] + 2)
        arguments = arguments._replace(float_workspace=torch.empty(size, dtype=torch.float32, device=q.device))
    dtypes, head_dims = (q.dtype, k.dtype, out.dtype), (q.shape[2], v.shape[-1])
    operators = builtin_operators(
        family, q.device.type, dtypes, head_dims, arguments.variant, KERNELS_BY_NUMBER[kernels] or q.device.type
    )
    operators.run(q, k, v, out, lse, *arguments, *parameters)


define_in_python(
    "attend_planned(str family, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, SymInt num_queries,"
    f" SymInt kv_size, SymInt kernels, {schema_of(CallArguments, 'SymInt')}, {schema_of(Parameters)}) -> ()",
    _attend_planned,
)
