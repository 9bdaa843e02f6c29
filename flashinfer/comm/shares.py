"""Reduce-scatter and all-gather over a workspace: the two halves of an all-reduce, for sequence parallelism."""

from __future__ import annotations

import torch

from .._ops.declare import define
from .._ops.errors import value_error
from .._ops.route import without_gradient
from .._ops.tensors import check_dims
from ..jit.modules.allreduce import gen_allreduce_module
from .workspace import TRTLLMAllReduceFusionWorkspace, check_workspace

__all__ = ["all_gather", "reduce_scatter"]

_reduce_scatter, _all_gather = (
    define(
        f"{name}(Tensor input, Tensor(a!) output, Tensor(b!) order, Tensor table, bool? enable_pdl) -> ()",
        gen_allreduce_module,
        fallback=without_gradient(name, "input"),
        on_host=("table",),
    )
    for name in ("reduce_scatter", "all_gather")
)


def reduce_scatter(
    input: torch.Tensor,
    workspace: TRTLLMAllReduceFusionWorkspace,
    output: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> torch.Tensor:
    """Sum ``input`` over the ranks of a workspace, and return this rank's share of the rows.

    All ranks make the same calls in the same order, also with other functions of the workspace. The bits are those of
    the rows of :func:`allreduce_fusion`'s sum. A workspace for inputs of ``max_token_num`` rows serves
    ``max_token_num`` rows of each rank.

    Args:
        input: ``[ranks * rows, hidden]``, contiguous, float32, float16 or bfloat16. Shape and dtype are equal on all
            ranks. Rank ``i`` gets the sum of ``input[i * rows : (i + 1) * rows]``.
        workspace: of :func:`create_allreduce_fusion_workspace`, on the device of ``input``.
        output: ``[rows, hidden]``, contiguous, allocated by default. It may be the view
            of this rank's rows of ``input``. It overlaps no other rows.
        launch_with_pdl: let the kernel start before the preceding kernel ends, on Hopper and newer.

    Returns:
        ``output``.

    Raises:
        ValueError: invalid shapes or devices, an input that does not fit, overlap, or a destroyed workspace. Nothing
            was sent.
        TypeError: invalid dtypes.
        GroupError: an earlier call of the workspace failed, see ``workspace.check()``. On the CPU, this call.
        GradientError: a tensor requires a gradient.
    """
    ranks = _ranks("reduce_scatter", input, workspace)
    if output is None:
        if input.shape[0] % ranks != 0:
            raise value_error("reduce_scatter", "input", f"{input.shape[0]} rows", f"a multiple of the {ranks} ranks")
        output = input.new_empty(input.shape[0] // ranks, input.shape[1])
    workspace._call(_reduce_scatter, input, output, workspace._order, workspace._table, launch_with_pdl)
    return output


def all_gather(
    input: torch.Tensor,
    workspace: TRTLLMAllReduceFusionWorkspace,
    output: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
) -> torch.Tensor:
    """Return the rows of all ranks of a workspace, in the order of ranks.

    All ranks make the same calls in the same order, also with other functions of the workspace. All ranks get the same
    bits: those of ``input``, except that a NaN whose bits are all set becomes another NaN.

    Args:
        input: ``[rows, hidden]``, contiguous, float32, float16 or bfloat16. Shape and dtype are equal on all ranks.
        workspace: of :func:`create_allreduce_fusion_workspace`, on the device of ``input``.
        output: ``[ranks * rows, hidden]``, contiguous, allocated by default. ``input`` may be
            the view of this rank's rows of it. It overlaps no other rows.
        launch_with_pdl: let the kernel start before the preceding kernel ends, on Hopper and newer.

    Returns:
        ``output``.

    Raises:
        ValueError: invalid shapes or devices, an input that does not fit, overlap, or a destroyed workspace. Nothing
            was sent.
        TypeError: invalid dtypes.
        GroupError: an earlier call of the workspace failed, see ``workspace.check()``. On the CPU, this call.
        GradientError: a tensor requires a gradient.
    """
    ranks = _ranks("all_gather", input, workspace)
    if output is None:
        output = input.new_empty(input.shape[0] * ranks, input.shape[1])
    workspace._call(_all_gather, input, output, workspace._order, workspace._table, launch_with_pdl)
    return output


def _ranks(op: str, input: torch.Tensor, workspace: TRTLLMAllReduceFusionWorkspace) -> int:
    check_dims(op, "input", input, 2)
    check_workspace(op, workspace)
    return workspace.world_size
