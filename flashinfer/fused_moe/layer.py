"""The two products of each expert with its tokens: four or five operators, the same for every routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._gemm.operators import GATE_FIRST, LINEAR_FIRST, grouped_gemm
from .._ops.sizes import exceeds
from ..mxfp4_gemm import mxfp4_gemm
from ..tllm_enums import ActivationType
from . import operators
from .workspace import Workspace

BLOCK = 128  # elements that share a scale
# Above this number of rows per expert, rows are gathered first: the CTAs of a cluster then share their loads.
MANY_ROWS = 160


@dataclass(frozen=True)
class Scales:
    """Scales of fp8 or MXFP4 weights and of the operands that they multiply.

    Those of MXFP4 are in the kernels' form, and their operands have 16 bits and no scale.

    With ``blocks`` each 128 x 128 of a weight has a scale, and so has each 128 elements of a row, which is
    quantised here. Otherwise each expert's fp8 weight has one, and ``activated`` is the factor of the second
    product's operand.
    """

    first: torch.Tensor  # [E] or [E, 2I / 128, H / 128]
    second: torch.Tensor  # [E] or [E, H / 128, I / 128]
    activated: torch.Tensor | None = None  # []
    blocks: bool = False

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scales of a weight as its product reads them."""
        return weight if self.blocks or weight.dtype == torch.uint8 else weight.view(-1, 1, 1)


@dataclass(frozen=True)
class Gate:
    """Activation between the products: its number, the order of its halves, and numbers of each expert.

    Situ reads ``situ_beta`` as ``alpha`` and ``situ_linear_beta`` as ``beta``.
    """

    activation: int
    gate_first: bool = False
    alpha: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    limit: torch.Tensor | None = None

    @property
    def is_plain_swiglu(self) -> bool:
        return self.activation == SWIGLU and self.alpha is None and self.beta is None and self.limit is None


def run_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    gate: Gate,
    *,
    first_expert: int = 0,
    scales: Scales | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    workspace: Workspace | None = None,
) -> None:
    """Write ``out[t] = sum over j of weights[t, j] * second[e] @ activated(first[e] @ x[t])``.

    Expert ``e`` is ``ids[t, j]``.

    Args:
        out: ``[T, H]``, of any dtype of 16 or 32 bits.
        x: ``[T, H]``.
        ids: ``[T, k]``, int32 or int64; those outside of ``[first_expert, first_expert + E)`` add nothing.
        weights: ``[T, k]`` float32; ``None``: 1.
        first, second: ``[E, N, H]`` and ``[E, H, I]``. N is I, or 2 I with a gate. In MXFP4, uint8 with
            half as many columns.
        biases: ``[E, N]`` and ``[E, H]``, float32.
        workspace: memory for the results of the products; ``None``: torch's allocator.
    """
    memory = workspace or Workspace()
    blocks, four_bits = scales is not None and scales.blocks, first.dtype == torch.uint8
    granularity = (1, BLOCK, BLOCK) if blocks else (0, 0, 0)
    bounds, tokens, rows = operators.sort(ids, first.shape[0], first_expert)
    dtype = x.dtype if scales is None or four_bits else out.dtype
    x_scales = None
    if blocks:
        x, x_scales = operators.activate(x, None, IDENTITY, False, None, None, None, None, None, True)
    row_indices: torch.Tensor | None = tokens
    if x.is_cuda and not four_bits and exceeds(ids.numel(), MANY_ROWS * first.shape[0]):
        x, row_indices = take_rows(x, tokens), None
        x_scales = None if x_scales is None else take_rows(x_scales, tokens)
    slots, row_scales = ids.shape[0] * ids.shape[1], None
    fuses_gate = x.is_cuda and x.dtype != torch.float32 and scales is None and biases[0] is None
    if fuses_gate and gate.is_plain_swiglu:
        activated = memory.empty((slots, first.shape[1] // 2), dtype, x.device)
        order = GATE_FIRST if gate.gate_first else LINEAR_FIRST
        grouped_gemm(activated, x, first, None, None, bounds, None, None, row_indices, None, *granularity, gate=order)
    else:
        hidden = memory.empty((slots, first.shape[1]), dtype, x.device)
        first_scales = None if scales is None else scales.of(scales.first)
        _multiply(hidden, x, first, x_scales, first_scales, bounds, row_indices, granularity)
        activated, row_scales = operators.activate(
            hidden, bounds, gate.activation, gate.gate_first, biases[0], gate.alpha, gate.beta, gate.limit,
            None if scales is None else scales.activated, blocks,
        )  # fmt: skip
    result = memory.empty((slots, second.shape[1]), dtype, x.device)
    second_scales = None if scales is None else scales.of(scales.second)
    _multiply(result, activated, second, row_scales if blocks else None, second_scales, bounds, None, granularity)
    operators.finalize(out, result, rows, weights, biases[1], bounds)


def _multiply(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor | None,
    scales: torch.Tensor | None, bounds: torch.Tensor, row_indices: torch.Tensor | None,
    granularity: tuple[int, int, int],
) -> None:  # fmt: skip
    """Multiply the rows of each expert by its matrix. A weight of uint8 is MXFP4, and ``x`` has no scales then."""
    if weight.dtype == torch.uint8:
        mxfp4_gemm(out, x, weight, scales, bounds, row_indices)
    else:
        grouped_gemm(out, x, weight, x_scales, scales, bounds, None, None, row_indices, None, *granularity)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if x.dtype.itemsize > 1:
        return x.index_select(0, rows)
    return x.view(torch.uint8).index_select(0, rows).view(x.dtype)  # some versions of torch cannot select 8-bit floats


SWIGLU, IDENTITY = int(ActivationType.Swiglu), int(ActivationType.Identity)
