"""Base of the two wrappers of prefill."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.arguments import check_no_extra, check_none
from .._ops.tensors import check_dims, check_tensor
from ..jit.modules._attention import KERNELS
from ..jit.modules.prefill import gen_customize_batch_prefill_module
from .accepted import check_backend
from .arguments import as_kernel_input
from .backward import differentiable, needs_differentiable, refuse_gradient, write_results
from .bound import Result
from .plan import check_inputs, from_shape
from .scales import NO_SCALES, Scale
from .wrapper import BatchWrapper


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
        jit_kwargs: dict[str, Any] | None,
    ) -> None:
        check_backend(type(self).__name__, backend, tuple(KERNELS), jit_args)
        self._backend = backend
        if jit_args is None:
            check_none(type(self).__name__, "jit_kwargs", jit_kwargs, "there are no jit_args")
        generate = partial(gen_customize_batch_prefill_module, backend, **(jit_kwargs or {}))
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, generate, jit_args)

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
        self._mask_buffers = self._custom_mask_buf, self._mask_indptr_buf = (mask, indptr)

    def _run_ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> Result:
        if not is_compiling() and not extra and (bound := self._bound) is not None:
            result = bound.call(q, k, v, scales, out, lse, return_lse)
            if result is not None:
                return result
        op = f"{self._name}.run"
        check_tensor(op, "q", q)
        check_dims(op, "k", k, 3)
        check_dims(op, "v", v, 3)
        k, v = as_kernel_input(k), as_kernel_input(v)
        if not needs_differentiable(q, k, v):
            return self._run(q, k, v, extra, scales, out, lse, return_lse)
        planned = self._planned_or_fail("run")
        if planned.operators.custom:
            refuse_gradient(op, "with jit_args: wanted tensors that require none")
        if scales != NO_SCALES:
            refuse_gradient(op, "with scales: wanted tensors that require none")
        check_no_extra(op, extra, " without jit_args")
        logits, sizes = planned.logits, (planned.batch.num_queries, planned.batch.kv_size)
        if is_dynamo_compiling():
            num_queries, kv_size, *_, window = from_shape(planned.sizes_as_shape)
            logits, sizes = logits._replace(window_left=window - 1), (num_queries, kv_size)
        check_inputs(op, planned, q, k, v, *sizes, self._use_cuda_graph)
        batch = planned.batch
        first, kv_first, qo_indptr = batch.first_query, batch.kv_start, batch.qo_indptr
        own_q, own_k, own_v = q, k, v  # gradients are for rows from 0
        if first or kv_first:
            own_q, own_k, own_v = (
                q[first:],
                _rows_from(k, kv_first, self._layout),
                _rows_from(v, kv_first, self._layout),
            )
            qo_indptr = cast(torch.Tensor, qo_indptr) - first

        def infer() -> tuple[torch.Tensor, ...]:
            inferred = cast(tuple[torch.Tensor, ...], self._run(q, k, v, (), NO_SCALES, None, None, True))
            return tuple(one[first:] for one in inferred) if first else inferred

        computed = differentiable(
            op, own_q, own_k, own_v, infer, self._layout, planned.workload.mask_mode(planned.options), logits,
            planned.workload.masks.packed, qo_indptr, batch.kv_lens,
        )  # fmt: skip
        if first:
            whole_out = torch.nn.functional.pad(computed[0], (0, 0, 0, 0, first, 0))
            computed = whole_out, torch.nn.functional.pad(computed[1], (0, 0, first, 0), value=-math.inf)
        return write_results(op, computed, out, lse, return_lse)


def _rows_from(x: torch.Tensor, start: int, layout: int) -> torch.Tensor:
    """Return ragged keys or values without the first ``start`` rows."""
    return x.narrow(layout, start, x.shape[layout] - start)
