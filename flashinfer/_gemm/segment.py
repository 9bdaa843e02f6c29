"""Wrapper for segments: rows of several requests, each with its own matrix, such as a LoRA adapter."""

from __future__ import annotations

import torch

from .._ops.arguments import check_present
from .._ops.dtypes import FP8, HALVES
from .._ops.errors import type_error
from .._ops.numbers import check_option, check_range
from .._ops.shapes import check_tensors
from .arguments import OUTPUTS, matrices, output, rows
from .operators import grouped_gemm

# Name of a backend -> the arch whose kernels it requires. With 0 the call and the device decide.
BACKENDS = {"auto": 0, "sm90": 90, "sm80": 0, "cpu": 0}
# Names of the operator's arguments in the public method.
NAMES = {"a": "x", "b": "weights", "m_indptr": "seg_indptr", "b_indices": "weight_indices"}
NAMES_OF_LENS = NAMES | {"m_indptr": "seg_lens"}


class SegmentGEMMWrapper:
    """Products of segments of rows with matrices: ``y[segment i] = x[segment i] @ weights[i]``.

    Segments follow each other and may be empty. Their bounds are read on the device.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        """Create a wrapper for one device.

        Args:
            float_workspace_buffer: any tensor on the device of the wrapper. It is not written.
            backend: ``sm90`` for the Hopper kernels or an error; otherwise the device decides.

        Raises:
            ValueError: another backend.
        """
        check_option("SegmentGEMMWrapper", "backend", backend, tuple(BACKENDS))
        self._arch = BACKENDS[backend]
        self.reset_workspace_buffer(float_workspace_buffer, None)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None
    ) -> None:
        """Use the device of another buffer. ``int_workspace_buffer`` is accepted for FlashInfer's callers."""
        if not isinstance(float_workspace_buffer, torch.Tensor):
            raise type_error(
                "SegmentGEMMWrapper", "float_workspace_buffer", type(float_workspace_buffer).__name__, "Tensor"
            )
        self.device = float_workspace_buffer.device

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute ``y[segment i] = x[segment i] @ weights[weight_indices[i]]``, by default ``weights[i]``.

        Args:
            x: ``[rows, d_in]``: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
            weights: ``[num_weights, d_out, d_in]`` if ``weight_column_major``, else
                ``[num_weights, d_in, d_out]``; of ``x``'s dtype, or either of fp8.
            batch_size: number of segments.
            out: ``[rows, d_out]`` of ``x``'s dtype (of fp8: bfloat16 or float16). Only rows in segments are
                written; a new one has zeros in the others.
            seg_lens: ``[batch_size]``, rows of each segment; int32 or int64, on any device.
            seg_indptr: ``[batch_size + 1]``, segment i has the rows ``seg_indptr[i]`` to
                ``seg_indptr[i + 1]``. It overrides ``seg_lens``. On a GPU no table is an error: segments end
                at the last row of x, a negative range is empty, and a row of two segments has the product of
                either.
            weight_indices: ``[batch_size]``; a segment with an invalid index is skipped.

        Returns:
            ``[rows, d_out]``, in bfloat16 for fp8.

        Raises:
            ValueError: invalid shapes, neither ``seg_lens`` nor ``seg_indptr``, a call that ``sm90`` does not
                serve, or on the CPU segments of invalid rows.
            TypeError: invalid dtypes.
            GradientError: a tensor requires a gradient; there is none.
        """
        name = "SegmentGEMMWrapper.run"
        if not isinstance(batch_size, int) and not hasattr(batch_size, "__index__"):
            raise type_error(name, "batch_size", repr(batch_size), "an int")
        fp8 = isinstance(x, torch.Tensor) and x.dtype in FP8
        outputs = HALVES[::-1] if fp8 else "x"
        count, _, num_weights, d_out = check_tensors(
            name, x=(x, "r i", (*OUTPUTS, *FP8)),
            weights=(weights, "w o i" if weight_column_major else "w i o", FP8 if fp8 else "x"), out=(out, "?r o", outputs),
        )  # fmt: skip
        if weight_indices is None:
            check_range(name, "weights", num_weights, batch_size, unit="matrices", why=", one for each segment")
        b = weights if weight_column_major else weights.transpose(1, 2)
        indptr = self._indptr(name, x, batch_size, seg_lens, seg_indptr)
        indices = self._list(name, "weight_indices", x, weight_indices, batch_size)
        default = torch.bfloat16 if fp8 else x.dtype
        result = output(name, out, x, (count, d_out), None, default=default, zeros=True)
        grouped_gemm(
            result, rows(x), matrices(b), None, None, indptr, None, indices, None, None, 0, 0, 0, arch=self._arch,
            names=NAMES_OF_LENS if seg_indptr is None else NAMES,
        )  # fmt: skip
        return result

    forward = run

    def _indptr(
        self,
        name: str,
        x: torch.Tensor,
        batch_size: int,
        seg_lens: torch.Tensor | None,
        seg_indptr: torch.Tensor | None,
    ) -> torch.Tensor:
        bounds = self._list(name, "seg_indptr", x, seg_indptr, batch_size + 1)
        if bounds is not None:
            return bounds
        lens = self._list(name, "seg_lens", x, seg_lens, batch_size)
        lens = check_present(name, "seg_lens", lens, "seg_lens or seg_indptr")
        return torch.nn.functional.pad(lens.cumsum(0), (1, 0))

    @staticmethod
    def _list(name: str, argument: str, x: torch.Tensor, table: torch.Tensor | None, count: int) -> torch.Tensor | None:
        if table is None:
            return None
        check_tensors(name, **{argument: (table, (count,), (torch.int32, torch.int64))})
        return table.to(x.device, non_blocking=True).contiguous()
