"""Wrapper of prefill over ragged keys and values."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from .._ops.indices import index_table
from .accepted import check_hints
from .arguments import CAUSAL, NON_CAUSAL
from .masks import mask_request
from .prefill_wrapper import BatchPrefill
from .request import PlanRequest, plan_settings
from .scales import Scale
from .signature import HostTables


class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefill):
    """Attention of a batch of requests over ragged keys and values: packed one request after another.

    Call ``plan()`` once for each set of lengths, then ``run()`` for each layer.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs: as for
            :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
        qo_indptr_buf, custom_mask_buf, mask_indptr_buf: likewise.
        kv_indptr_buf: ``[batch_size + 1]`` int32.

    Raises:
        ValueError, TypeError: buffers, a layout or a backend that do not fit.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: tuple[Any, ...] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._prefill_buffers(qo_indptr_buf, custom_mask_buf, mask_indptr_buf)
        self._kv_indptr_buf = self._graph_buffer("kv_indptr_buf", kv_indptr_buf)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        o_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Schedule the work of a batch. Call this method whenever lengths change.

        Args:
            kv_indptr: ``[batch_size + 1]`` integers, the first key of each request in ``k`` and ``v``. It may
                be a slice of a longer table.
            fixed_split_size: as for the paged wrapper, in keys.
            qo_indptr, num_qo_heads, ...: every other argument as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.

        Raises:
            ValueError, TypeError: as :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        op = self._plan_op
        settings = plan_settings(
            op,
            (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo),
            (q_data_type, kv_data_type, self._dtype_o or o_data_type),
            bool(causal),
            (pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta),
            (fixed_split_size, disable_split_kv),
            default=self._default_rule,
        )
        masks = mask_request(
            op, custom_mask, packed_custom_mask, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len,
            max_item_len_ptr, self._mask_buffers,
        )  # fmt: skip
        queries, keys = index_table(op, "qo_indptr", qo_indptr), index_table(op, "kv_indptr", kv_indptr)
        if any(one is not None for one in (seq_lens, max_token_per_sequence, max_sequence_kv)):
            check_hints(
                op, keys.numel() - 1, seq_lens, None, max_token_per_sequence=max_token_per_sequence,
                max_sequence_kv=max_sequence_kv,
            )  # fmt: skip
        shape, run_shape = settings.shape, None
        # float64 has no kernel and serves checks of gradients. Plan as for float32; differentiable() runs it.
        is_wide = shape.dtype_q is torch.float64 and shape.dtype_kv is shape.dtype_o is torch.float64
        if is_wide and self.device.type == "cpu" and self._custom is None:
            narrow = shape._replace(dtype_q=torch.float32, dtype_kv=torch.float32, dtype_o=torch.float32)
            settings, run_shape = settings._replace(shape=narrow), shape
        names, buffers = ("kv_indptr", "", ""), (self._qo_indptr_buf, self._kv_indptr_buf, None, None)
        tables = HostTables(queries, None, keys)
        self._plan_request(PlanRequest(op, settings, tables, names, buffers, masks, non_blocking, run_shape))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the planned batch.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, longer with CUDA graphs.
            k, v: ``[kv_indptr[-1], num_kv_heads, head_dim_qk]`` and ``[kv_indptr[-1], num_kv_heads,
                head_dim_vo]`` (NHD), or with the first two dimensions exchanged (HND). They may be longer.
                Strides are free; tensors that kernels cannot read are copied.
            args, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl: as for
                :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns:
            As :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`, with gradients for ``q``, ``k`` and
            ``v``.

        Raises:
            ValueError, TypeError: as :meth:`flashinfer.BatchPrefillWithPagedKVCacheWrapper.run`.
            GradientError: a gradient is required with scales.
        """
        return self._run_ragged(q, k, v, args, (q_scale, k_scale, v_scale), out, lse, return_lse)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run with options that replace those of :meth:`plan` until the next plan. Deprecated.

        Options are arguments of the kernels, so layers may alternate, also in a captured graph. No new plan
        is made if the last one holds all visible keys. If masks or windows differ, plan without them.

        Raises:
            ValueError, TypeError: as :meth:`plan` and :meth:`run`.
            CaptureError: a CUDA graph is being captured, and the options need another plan.
        """
        self._use_options(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta,
            CAUSAL if causal else NON_CAUSAL,
        )  # fmt: skip
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = partialmethod(forward, return_lse=True)
