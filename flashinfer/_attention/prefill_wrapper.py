"""What the two wrappers of prefill share: masks, one read of tables that are on a device, options of forward()."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from ..jit.modules.prefill import check_kernels, gen_customize_batch_prefill_module
from ..prefill_backward import differentiable, refuse, results, wanted
from ..utils import canonicalize_torch_dtype
from .arguments import CAUSAL, NO_SCALES, NON_CAUSAL, Logits, check_dims, check_tensor, logits_of, rows_of
from .bound import Result
from .masks import MaskTensors, MultiItem, masks_of
from .schedule import Shape, check_indptr, check_table, on_host
from .traced import from_shape
from .wrapper import Batch, BatchWrapper, Tables


class BatchPrefill(BatchWrapper):
    """Base of the wrappers of prefill."""

    _family = "prefill"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: tuple[Any, ...] | None,
    ) -> None:
        check_kernels(backend)
        self._backend = backend
        custom = None
        if jit_args is not None:
            arguments = tuple(jit_args)

            def custom(device: str) -> Any:
                return gen_customize_batch_prefill_module(backend, *arguments, device=device)  # type: ignore[misc]

        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, custom)
        self._dtype_o = None if jit_args is None else canonicalize_torch_dtype(jit_args[3])

    def _prefill_buffers(
        self,
        qo_indptr_buf: torch.Tensor | None,
        custom_mask_buf: torch.Tensor | None,
        mask_indptr_buf: torch.Tensor | None,
    ) -> None:
        self._qo_indptr_buf = self._graph_buffer("qo_indptr_buf", qo_indptr_buf)
        mask, indptr = custom_mask_buf, mask_indptr_buf
        if mask is not None:
            mask = self._graph_buffer("custom_mask_buf", mask, torch.uint8)
        if indptr is not None:
            indptr = self._graph_buffer("mask_indptr_buf", indptr)
        self._mask_buffers = (mask, indptr)

    def _shape(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None,
        q_data_type: str | torch.dtype,
        kv_data_type: str | torch.dtype | None,
    ) -> Shape:
        q_dtype = canonicalize_torch_dtype(q_data_type)
        kv_dtype = q_dtype if kv_data_type is None else canonicalize_torch_dtype(kv_data_type)
        vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        shape = Shape(num_qo_heads, num_kv_heads, head_dim_qk, vo, q_dtype, kv_dtype, self._dtype_o or q_dtype)
        shape.check(f"{self._name}.plan")
        return shape

    def _queries(self, tables: Tables, given: torch.Tensor, near: torch.Tensor) -> None:
        """Check ``qo_indptr`` and keep it for a graph."""
        check_indptr(tables.op, "qo_indptr", near)
        self._check_batch_size(tables.op, "qo_indptr", near.numel() - 1, self._qo_indptr_buf)
        if self._qo_indptr_buf is not None:
            tables.take("qo_indptr", self._qo_indptr_buf, given)

    def _plan_paged(
        self,
        qo_indptr: torch.Tensor,
        given: dict[str, torch.Tensor],
        page_size: int,
        shape: Shape,
        logits: Logits,
        causal: bool,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        items: MultiItem,
        non_blocking: bool,
    ) -> None:
        tables = Tables(f"{self._name}.plan", self.device, non_blocking)
        indptr, _, last = given.values()
        near, *near_kv, prefix_len = on_host(qo_indptr, indptr, last, self._prefix_len(tables.op, items))
        self._queries(tables, qo_indptr, near)
        batch = self._paged_batch(tables, near, page_size, near_kv, **given)
        masks = self._masks(tables, batch, custom_mask, packed_custom_mask, items, prefix_len)
        self._plan(batch, shape, logits, CAUSAL if causal else NON_CAUSAL, masks, page_size, tables)

    def _plan_ragged(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indptr_buf: torch.Tensor | None,
        shape: Shape,
        logits: Logits,
        causal: bool,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        items: MultiItem,
        non_blocking: bool,
    ) -> None:
        tables = Tables(f"{self._name}.plan", self.device, non_blocking)
        near, near_kv, prefix_len = on_host(qo_indptr, kv_indptr, self._prefix_len(tables.op, items))
        self._queries(tables, qo_indptr, near)
        check_indptr(tables.op, "kv_indptr", near_kv, near.numel() - 1)
        placed = tables.take("kv_indptr", kv_indptr_buf, kv_indptr)
        # Copied: the caller may change his own, and gradients are computed long after the call.
        batch = Batch(int(near[-1]), near.clone(), near_kv.diff(), int(near_kv[-1]), placed, None)
        masks = self._masks(tables, batch, custom_mask, packed_custom_mask, items, prefix_len)
        self._plan(batch, shape, logits, CAUSAL if causal else NON_CAUSAL, masks, None, tables)

    def _plan(
        self, batch: Batch, shape: Shape, logits: Logits, causal: int, masks: MaskTensors, page_size: int | None,
        tables: Tables | None = None,
    ) -> None:  # fmt: skip
        # No kernel has float64, which is there to check gradients in: planned like float32, run by differentiable().
        wide = page_size is None and self.device.type == "cpu" and self._custom is None
        if not wide or {shape.dtype_q, shape.dtype_kv, shape.dtype_o} != {torch.float64}:
            return super()._plan(batch, shape, logits, causal, masks, page_size, tables)
        narrow = replace(shape, dtype_q=torch.float32, dtype_kv=torch.float32, dtype_o=torch.float32)
        super()._plan(batch, narrow, logits, causal, masks, page_size, tables)
        self._planned, self._bound = replace(self._planned_or_fail("plan"), shape=shape), None

    def _run_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: tuple[Any, ...],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> Result:
        if not is_compiling() and not args and (bound := self._bound) is not None:
            result = bound.call(q, k, v, NO_SCALES, out, lse, return_lse)
            if result is not None:
                return result
        op = f"{self._name}.run"
        check_tensor(op, "q", q)
        check_dims(op, "k", k, 3)
        check_dims(op, "v", v, 3)
        k, v = rows_of(k), rows_of(v)
        if not wanted(q, k, v):
            return self._run(q, k, v, args, NO_SCALES, out, lse, return_lse)
        planned = self._planned_or_fail("run")
        if planned.operators.custom:
            refuse(op, "with jit_args: wanted tensors that require none")
        if args:
            raise TypeError(f"{op}: got {len(args)} more arguments, wanted none without jit_args")
        logits, sizes = planned.logits, (planned.batch.rows, planned.batch.kv_rows)
        if is_dynamo_compiling():
            rows, kv_rows, *_, window = from_shape(planned.sizes)
            logits, sizes = logits._replace(window_left=window - 1), (rows, kv_rows)
        self._check_run(planned, q, k, v, *sizes)
        computed = differentiable(
            op, q, k, v, lambda: self._run(q, k, v, (), NO_SCALES, None, None, True), self._layout,
            planned.causal if planned.masks.mode is None else planned.masks.mode, logits, planned.masks.packed,
            planned.batch.qo_indptr, planned.batch.kv_lens,
        )  # fmt: skip
        return results(op, computed, out, lse, return_lse)

    def _prefix_len(self, op: str, items: MultiItem) -> torch.Tensor | None:
        if items.prefix_len_ptr is not None:
            check_table(op, "prefix_len_ptr", items.prefix_len_ptr, torch.uint32)
        return items.prefix_len_ptr

    def _masks(
        self,
        tables: Tables,
        batch: Batch,
        custom_mask: torch.Tensor | None,
        packed_custom_mask: torch.Tensor | None,
        items: MultiItem,
        prefix_len: torch.Tensor | None,
    ) -> MaskTensors:
        assert batch.qo_indptr is not None
        return masks_of(
            tables, batch.qo_indptr, batch.kv_lens, custom_mask, packed_custom_mask, items, prefix_len,
            self._mask_buffers, self._use_cuda_graph,
        )  # fmt: skip

    def _options(
        self,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """What forward() was given takes the place of what plan() was."""
        head_dim = self._planned_or_fail("forward").shape.head_dim_qk
        logits = logits_of(
            f"{self._name}.forward", head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta,
        )  # fmt: skip
        self._plan_again(logits, CAUSAL if causal else NON_CAUSAL)
