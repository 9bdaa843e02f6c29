"""The wrapper of segments: rows of several requests, each with a matrix of its own, as LoRA's adapters have them."""

from __future__ import annotations

import torch

from .._ops.dtypes import FP8
from .arguments import OUTPUTS, check_dims, check_dtype, check_same_depth, check_shape, matrices, output, rows
from .operators import grouped_gemm

BACKENDS = ("auto", "sm90", "sm80", "cpu")
NAMES = {
    "a": "x",
    "b": "weights",
    "m_indptr": "seg_indptr",
    "b_indices": "weight_indices",
}  # of the operator's arguments
NAMES_OF_LENS = NAMES | {"m_indptr": "seg_lens"}


class SegmentGEMMWrapper:
    """Products of segments of rows with matrices: ``y[segment i] = x[segment i] @ weights[i]``.

    Segments lie one after the other and may be empty. Where they are is read on the device.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        """
        Args:
            float_workspace_buffer: on the device that the wrapper is for; nothing is kept in it.
            backend: ``sm90`` for the kernels for Hopper alone, or an error; others leave the choice to the device.

        Raises:
            ValueError: another backend.
        """
        if backend not in BACKENDS:
            raise ValueError(f"SegmentGEMMWrapper: backend: got {backend!r}, wanted one of {', '.join(BACKENDS)}")
        self._sm90 = backend == "sm90"
        self.reset_workspace_buffer(float_workspace_buffer, None)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None
    ) -> None:
        """Use the device of another buffer from now on; ``int_workspace_buffer`` is accepted for FlashInfer's callers."""
        if not isinstance(float_workspace_buffer, torch.Tensor):
            raise TypeError(
                f"SegmentGEMMWrapper: float_workspace_buffer: got {type(float_workspace_buffer).__name__}, wanted Tensor"
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
        """``y[segment i] = x[segment i] @ weights[weight_indices[i]]``, or ``weights[i]`` without indices.

        Args:
            x: ``[rows, d_in]``: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
            weights: ``[num_weights, d_out, d_in]`` where ``weight_column_major``, else ``[num_weights, d_in, d_out]``; ``x``'s
                dtype, or either of fp8.
            batch_size: number of segments.
            out: ``[rows, d_out]`` of ``x``'s dtype (of fp8: bfloat16 or float16), of which rows in segments are written; a new
                one has zeros in the others.
            seg_lens: ``[batch_size]``, rows of each segment; int32 or int64, on any device.
            seg_indptr: ``[batch_size + 1]``, segment i has the rows ``seg_indptr[i]`` to ``seg_indptr[i + 1]``; wins over ``seg_lens``.
                For x on a GPU no table is an error: segments end where x does, one that ends before it begins is empty,
                and rows of two have the product of either.
            weight_indices: ``[batch_size]``; a segment whose index is no matrix's is left out.

        Returns:
            ``[rows, d_out]``, in bfloat16 for fp8.

        Raises:
            ValueError: shapes that do not fit, neither ``seg_lens`` nor ``seg_indptr``, what ``sm90`` cannot serve, or on
                the CPU segments of rows that there are not.
            TypeError: dtypes that do not fit.
            GradientError: a tensor wants a gradient; there is none.
        """
        name = "SegmentGEMMWrapper.run"
        if not isinstance(batch_size, int) and not hasattr(batch_size, "__index__"):
            raise TypeError(f"{name}: batch_size: got {batch_size!r}, wanted an int")
        check_dims(name, 2, x=x)
        check_dims(name, 3, weights=weights)
        check_dtype(name, "x", x.dtype, (*OUTPUTS, *FP8))
        check_dtype(name, "weights", weights.dtype, FP8 if x.dtype in FP8 else (x.dtype,))
        b = weights if weight_column_major else weights.transpose(1, 2)
        check_same_depth(name, x, b, ("x", "weights"))
        if weight_indices is None and weights.shape[0] < batch_size:
            raise ValueError(
                f"{name}: weights: got {weights.shape[0]} matrices, wanted {batch_size}, one for each segment"
            )
        indptr = self._indptr(name, x, batch_size, seg_lens, seg_indptr)
        indices = self._list(name, "weight_indices", x, weight_indices, batch_size)
        halves = (torch.bfloat16, torch.float16) if x.dtype in FP8 else (x.dtype,)
        result = output(name, out, x, (x.shape[0], b.shape[1]), None, default=halves[0], zeros=True)
        check_dtype(name, "out", result.dtype, halves)
        grouped_gemm(
            result, rows(x), matrices(b), None, None, indptr, None, indices, None, None, 0, 0, 0, sm90=self._sm90,
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
        given = self._list(name, "seg_indptr", x, seg_indptr, batch_size + 1)
        if given is not None:
            return given
        lens = self._list(name, "seg_lens", x, seg_lens, batch_size)
        if lens is None:
            raise ValueError(f"{name}: seg_lens: got None beside seg_indptr None, wanted one of them")
        return torch.nn.functional.pad(lens.cumsum(0), (1, 0))

    @staticmethod
    def _list(name: str, argument: str, x: torch.Tensor, given: torch.Tensor | None, count: int) -> torch.Tensor | None:
        if given is None:
            return None
        check_dims(name, 1, **{argument: given})
        check_dtype(name, argument, given.dtype, (torch.int32, torch.int64))
        check_shape(name, argument, given, (count,))
        return given.to(x.device, non_blocking=True).contiguous()
