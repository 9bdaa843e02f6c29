"""Concurrent prefill of one request and decode of a batch, for servers with chunked prefill.

Source: Kamath et al.: POD-Attention: Unlocking Full Prefill-Decode Overlap for Faster LLM Inference, 2025.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling

from ._attention.arguments import POS_ENCODINGS, Logits, PagedCache, logits_of
from ._attention.plan import NoCopies
from ._attention.scales import Scale
from ._ops.arguments import check_no_extra, check_none, check_planned
from ._ops.errors import call_as
from ._ops.numbers import check_option
from ._ops.tensors import check_dims
from .decode import BatchDecodeWithPagedKVCacheWrapper
from .prefill import single_prefill_with_kv_cache

__all__ = ["PODWithPagedKVCacheWrapper"]

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# An argument of the inner function -> its name here.
_OPTIONS = ("kv_layout", "pos_encoding_mode", "sm_scale", "window_left", "rope_scale", "rope_theta")
_OF_PREFILL = {name: f"{name}_p" for name in ("q", "k", "v", "custom_mask", "packed_custom_mask", *_OPTIONS)}
_OF_DECODE = {name: f"{name}_d" for name in ("q", "paged_kv_cache", *_OPTIONS)}


class PODWithPagedKVCacheWrapper(NoCopies):
    """Prefill of one request (``_p``) and decode of a batch over a paged cache (``_d``) in one call.

    On CUDA the two run on two streams, so each uses the multiprocessors and bandwidth that the other leaves
    idle. In a graph of ``torch.compile`` they run one after the other.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph: options of the decode, as for
            :class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper`.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: buffers of the
            decode's tables, as for the same class.
        jit_args: ``None``. Use the wrappers of prefill and decode for custom variants.

    Raises:
        ValueError, TypeError: buffers or a layout that do not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: tuple[Any, ...] | None = None,
    ) -> None:
        self._name = type(self).__name__
        check_none(self._name, "jit_args", jit_args, "use the wrappers of prefill and decode")
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, False, paged_kv_indptr_buffer, paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )  # fmt: skip
        self._kv_layout = kv_layout
        self._logits: Logits | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if the decode's tables are copied to the caller's buffers, for CUDA graphs."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces, as :class:`flashinfer.BatchDecodeWithPagedKVCacheWrapper` does."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._logits = None

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Balance the work of the decode, as :meth:`flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan`.

        Args:
            indptr, indices, last_page_len: ``[batch_size + 1]``, ``[indptr[-1]]`` and ``[batch_size]``
                integers.
            num_qo_heads, ...: every other argument as for that method.

        Raises:
            ValueError, TypeError: as that method.
        """
        self._logits = None  # until the plan is made
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
            window_left, None, q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta, non_blocking,
        )  # fmt: skip
        self._logits = self._decode._planned_or_fail("plan").logits

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Result, Result]:
        """Compute attention of the request and of the planned batch.

        Args:
            q_p: ``[qo_len, num_qo_heads, head_dim]``.
            k_p, v_p: ``[kv_len, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_len, head_dim]``
                (HND).
            custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p, window_left_p: masks and layout of the
                prefill, as for :func:`flashinfer.single_prefill_with_kv_cache`.
            pos_encoding_mode_p, sm_scale_p, rope_scale_p, rope_theta_p, return_lse_p: options of the prefill,
                as for the same function.
            q_d: ``[batch_size, num_qo_heads, head_dim]``.
            paged_kv_cache_d, q_scale, k_scale, v_scale, return_lse_d: arguments of the decode, as for
                :meth:`flashinfer.BatchDecodeWithPagedKVCacheWrapper.run`.
            pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: replace :meth:`plan`'s
                values if they are not the defaults.
            kv_layout_d: the wrapper's layout or the default.
            custom_mask_d, packed_custom_mask_d: ``None``. A query of a decode sees all keys.
            causal_d, use_fp16_qk_reduction, enable_pdl: accepted and ignored.

        Returns:
            ``(out_p, out_d)``. With ``return_lse_p`` or ``return_lse_d``, that result is ``(out, lse)``.

        Raises:
            ValueError: no plan, or shapes, strides, layouts, masks or devices that do not fit.
            TypeError: dtypes that do not fit, or more positional arguments.
        """
        op = f"{self._name}.run"
        check_planned(op, self._logits)
        check_no_extra(op, args)
        for name, mask in (("custom_mask_d", custom_mask_d), ("packed_custom_mask_d", packed_custom_mask_d)):
            check_none(op, name, mask, "a query of a decode sees all keys")
        if kv_layout_d != "NHD":
            check_option(op, "kv_layout_d", kv_layout_d, (self._kv_layout,), " as the wrapper has")
        check_dims(op, "q_d", q_d, 3)
        logits = call_as(
            _OF_DECODE, self._logits_of, op, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d
        )
        self._decode._use_logits(logits)
        shape = self._decode._planned_or_fail("run").shape
        # Results are allocated on the caller's stream. The allocator would reuse a side stream's memory too
        # early.
        out_d = torch.empty((*q_d.shape[:2], shape.head_dim_vo), dtype=shape.dtype_o, device=q_d.device)
        lse_d = torch.empty(q_d.shape[:2], dtype=torch.float32, device=q_d.device) if return_lse_d else None
        stream = self._side_stream(q_d.device)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            call_as(
                _OF_DECODE, self._decode.run, q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
                out=out_d, lse=lse_d,
            )  # fmt: skip
        try:
            result_p = call_as(
                _OF_PREFILL, single_prefill_with_kv_cache, q_p, k_p, v_p, custom_mask=custom_mask_p,
                packed_custom_mask=packed_custom_mask_p, causal=causal_p, kv_layout=kv_layout_p,
                pos_encoding_mode=pos_encoding_mode_p, sm_scale=sm_scale_p, window_left=window_left_p,
                rope_scale=rope_scale_p, rope_theta=rope_theta_p, return_lse=return_lse_p,
            )  # fmt: skip
        finally:
            if stream is not None:
                torch.cuda.current_stream(q_d.device).wait_stream(stream)
        return result_p, out_d if lse_d is None else (out_d, lse_d)

    forward = run

    def end_forward(self) -> None:
        """Do nothing. Callers of older interfaces use it."""

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the decode's stream, after letting it wait for the current stream.

        ``None`` is the current stream, as in a graph of ``torch.compile``, which has one stream.
        """
        if device.type != "cuda" or is_compiling():
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def _logits_of(
        self,
        op: str,
        pos_encoding_mode: str,
        sm_scale: float | None,
        window_left: int,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> Logits:
        """Return the planned options, after replacing those that a run passes."""
        planned = self._logits
        assert planned is not None
        return logits_of(
            op,
            1,  # unused, because sm_scale is never None here
            list(POS_ENCODINGS)[planned.pos_encoding_mode] if pos_encoding_mode == "NONE" else pos_encoding_mode,
            planned.window_left if window_left < 0 else window_left,
            planned.logits_soft_cap,
            planned.sm_scale if sm_scale is None else sm_scale,
            planned.rope_scale if rope_scale is None else rope_scale,
            planned.rope_theta if rope_theta is None else rope_theta,
        )
