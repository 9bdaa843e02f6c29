"""Planned runs under ``torch.compile``: one operator whose arguments are what a plan says, sizes among them.

A module's own ``run`` would be compiled for the numbers of one plan, and for the kernels that ``auto`` chose for it. This
one is compiled for all plans of a wrapper: it finds the module when the graph runs. Partial results lie in memory of the
call: a workspace that a graph writes would be one of its mutated inputs, which CUDA graphs of ``torch.compile`` do not
take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._ops.declare import define_in_python
from ..jit.modules._attention import HOPPER
from .operators import builtin_operators
from .signature import Parameters, Setting, schema_of

# A plan's kernels, as a size of it: those that run everywhere come first.
_KERNELS = ("", HOPPER)


def number_of_kernels(kernels: str) -> int:
    """What ``attend_planned`` takes for the kernels of a plan."""
    return _KERNELS.index(kernels) if kernels in _KERNELS else 0


def _attend_planned(
    family: str,
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rows: int,
    kv_rows: int,
    kernels: int,
    *setting_and_parameters: Any,
) -> None:
    setting = Setting(*setting_and_parameters[: len(Setting._fields)])
    parameters = setting_and_parameters[len(setting) :]
    got = k.shape[0] if k.dim() == 4 else k.shape[setting.kv_layout]
    # Sizes of which a graph knows nothing have not been compared with the plan's.
    if q.shape[0] < rows or got < kv_rows:
        raise ValueError(
            f"{op}: q, k: got {q.shape[0]} queries and {got} rows or pages of keys, and the plan is for {rows} and {kv_rows}"
        )
    heads = k.shape[k.dim() - 2 - setting.kv_layout]
    if setting.max_slots:
        size = setting.max_slots * heads * setting.slot_rows * (v.shape[-1] + 2)
        setting = setting._replace(float_workspace=torch.empty(size, dtype=torch.float32, device=q.device))
    dtypes, head_dims = (q.dtype, k.dtype, out.dtype), (q.shape[2], v.shape[-1])
    operators = builtin_operators(
        family, q.device.type, dtypes, head_dims, setting.variant, _KERNELS[kernels] or q.device.type
    )
    operators.run(q, k, v, out, lse, *setting, *parameters)


define_in_python(
    "attend_planned(str family, str op, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, SymInt rows,"
    f" SymInt kv_rows, SymInt kernels, {schema_of(Setting, 'SymInt')}, {schema_of(Parameters)}) -> ()",
    _attend_planned,
)


# Far from any size of any tensor, and from each other: torch takes sizes that are equal once for one and the same.
_APART = 1 << 40
_NOTHING = torch.empty(0, device="cpu")  # whatever the default device of the import is


def as_shape(sizes: Sequence[int]) -> torch.Tensor:
    """Sizes of a plan as those of a tensor without elements, which a graph follows from plan to plan.

    Integers it would take for constants, where they are attributes of what a module or a global variable holds.
    """
    shape = (0, *(_APART * (number + 1) + size for number, size in enumerate(sizes)))
    return _NOTHING.as_strided(shape, (0,) * len(shape))


def from_shape(carrier: torch.Tensor) -> list[int]:
    """The sizes that :func:`as_shape` was given."""
    return [size - _APART * (number + 1) for number, size in enumerate(carrier.shape[1:])]
