"""Base of the wrappers. A plan binds its arguments once, so ``run()`` passes only tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.arguments import check_no_extra, check_none
from .._ops.dtypes import is_fp8
from .._ops.errors import renamed
from .._ops.scalars import numbers_of
from .._ops.tensors import check_count, check_device, check_tensor, check_vector
from ..jit.module import JitSpec
from ..utils import canonicalize_torch_dtype
from .accepted import default_rule
from .arguments import (
    PagedCache,
    as_kernel_input,
    caches_of,
    check_sinks,
    layout_of,
    no_gradient,
    parameters_of,
)
from .bound import LastRun, Result
from .events import Events
from .lists import Scheduler
from .operators import call, custom_operators
from .plan import NoCopies, Plan, check_inputs, from_shape, results_of
from .planner import Planner
from .scales import NO_SCALES, Scale, head_scales, scaled_query, value_scale
from .signature import CallArguments, Parameters

_SLOPES = "maybe_alibi_slopes"


class BatchWrapper(NoCopies, Planner):
    """Base of the public wrappers: one plan, and the runs of its batch."""

    _paged_buffers: tuple[torch.Tensor | None, ...] = (None, None, None)
    _few_queries = False  # of each request
    # Name of the argument of run() that holds keys and values, or empty if ``k`` and ``v`` are separate arguments.
    _cache_argument = "paged_kv_cache"
    # Names of a custom variant's tensors, and the number of all its parameters.
    _variant_parameters: tuple[tuple[str, ...], int] = ((), 0)

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        generate: Callable[..., JitSpec] | None = None,
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        """Initialise. With ``jit_args``, ``generate(*jit_args, device=...)`` builds the kernels of a custom variant."""
        self._name = type(self).__name__
        self._plan_op = f"{self._name}.plan"
        self._layout = layout_of(self._name, kv_layout)
        self._kv_layout = kv_layout
        self._use_cuda_graph = bool(use_cuda_graph)
        # The environment is read here, so that plans need not read it.
        self._default_rule = default_rule(self._few_queries and not self._use_cuda_graph)
        check_tensor(self._name, "float_workspace_buffer", float_workspace_buffer)
        self._scheduler = Scheduler(f"{self._name}.plan", float_workspace_buffer, self._use_cuda_graph)
        self.device = self._scheduler.device
        self._custom, self._dtype_o = None, None
        if generate is not None and jit_args is not None:
            self._custom = custom_operators(generate(*jit_args, device=self.device.type))
            self._dtype_o = canonicalize_torch_dtype(jit_args[3])
            self._variant_parameters = tuple(jit_args[7]), len(jit_args[7]) + len(jit_args[9])
            self._needs_slopes = _SLOPES in self._variant_parameters[0]
        self._last_run, self._events = LastRun(), Events()
        self._forget_plan()

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Return True if plans copy tables to the caller's buffers, for CUDA graphs."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Use other workspaces. Afterwards, plan before the next run, and capture graphs again.

        Args:
            float_workspace_buffer: for partial states, on the wrapper's device.
            int_workspace_buffer: for plans, on the same device.

        Raises:
            ValueError: another device, or buffers that are not contiguous.
        """
        op, name = f"{self._name}.reset_workspace_buffer", "float_workspace_buffer"
        check_tensor(op, name, float_workspace_buffer)
        check_device(op, name, float_workspace_buffer, self.device)
        self._scheduler.reset(float_workspace_buffer, int_workspace_buffer)
        self._forget_plan()

    def _graph_buffer(
        self, name: str, buffer: torch.Tensor | None, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor | None:
        """Return a checked buffer of the constructor, or ``None`` without CUDA graphs."""
        if not self._use_cuda_graph:
            return None
        checked = check_vector(self._name, name, buffer, dtype)
        check_device(self._name, name, checked, self.device)
        return checked

    def _paged_graph_buffers(self, **buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Check the buffers of indptr, indices and last_page_len, passed by the constructor's names."""
        checked = tuple(self._graph_buffer(name, buffer) for name, buffer in buffers.items())
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = checked
        (indptr_name, _, last_name), (indptr, _, last) = buffers, checked
        if indptr is not None and last is not None:
            check_count(self._name, last_name, last, indptr.numel() - 1, f", one less than {indptr_name}")
        self._fixed_batch_size = 0 if indptr is None else indptr.numel() - 1
        return checked

    def end_forward(self) -> None:
        """Do nothing; kept for callers of older interfaces."""

    def _run_paged(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        extra: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        try:
            if not is_compiling() and not extra and sinks is None and (bound := self._bound) is not None:
                k, v = paged_kv_cache, None
                # isinstance() on a tensor is slower than a comparison of types.
                if type(k) is not torch.Tensor and isinstance(k, (tuple, list)) and len(k) == 2:
                    k, v = k
                result = bound.call(q, k, v, scales, out, lse, return_lse)
                if result is not None:
                    return result
            k, v = caches_of(f"{self._name}.run", paged_kv_cache, self._layout)
            return self._run(q, k, v, extra, scales, out, lse, return_lse, sinks)
        except (ValueError, TypeError) as err:
            raise renamed(err, self._names_of_cache(isinstance(paged_kv_cache, torch.Tensor))) from None

    def _names_of_cache(self, is_one: bool) -> dict[str, str]:
        """Return the caller's names of keys and values. ``is_one``: one tensor holds both."""
        if not self._cache_argument:
            return {}
        name = self._cache_argument
        k, v = (name, name) if is_one else (f"{name}[0]", f"{name}[1]")
        return {"k": k, "v": v, "paged_kv_cache": name}

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        planned = self._planned
        if planned is None:
            planned = self._planned_or_fail("run")
        no_gradient(self._name, (q, k, v, sinks, *extra), ".run")
        if sinks is not None:
            check_sinks(f"{self._name}.run", sinks, planned.shape.num_qo_heads, self.device, planned.operators.custom)
        if is_dynamo_compiling() and planned.operators.traced:
            return self._run_traced(planned, q, k, v, extra, scales, out, lse, return_lse, sinks)
        # All layers have the same shapes, so each set of shapes is checked once.
        seen = (q.shape, k.shape, v.shape, q.dtype, k.dtype) if isinstance(q, torch.Tensor) else None
        if seen is None or seen != self._checked_call:
            check_inputs(
                f"{self._name}.run", planned, q, k, v, planned.batch.num_queries, planned.batch.kv_size,
                self._allows_more_queries, self._q_len_per_req,
            )  # fmt: skip
            self._checked_call = seen
        if not q.is_contiguous() or q.is_cuda:
            q = as_kernel_input(q)
        arguments: CallArguments = planned.arguments
        parameters, scale_output = planned.parameters, None
        if extra or planned.operators.custom or scales != NO_SCALES:
            q, arguments, parameters, scale_output = self._scaled(planned, q, extra, scales)
        if sinks is not None:
            parameters = cast(Parameters, parameters)._replace(maybe_sinks=sinks)
        out, lse = results_of(f"{self._name}.run", planned.shape, q, out, lse, return_lse)
        self._last_run.record(self.device)
        call(self._name, planned.operators.run, q, k, v, out, lse, *arguments, *parameters)
        if scale_output is not None:
            scale_output(out)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _run_traced(
        self,
        planned: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        extra: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run under ``torch.compile``, like :meth:`_run`: one graph serves all plans."""
        op = f"{self._name}.run"
        check_no_extra(op, extra, " without jit_args")
        sizes = from_shape(planned.sizes_as_shape)
        check_inputs(op, planned, q, k, v, sizes[0], sizes[1], self._allows_more_queries, self._q_len_per_req)
        shape, logits, arguments = planned.shape, planned.logits, planned.arguments
        out, lse = results_of(op, shape, q, out, lse, return_lse)
        q, by_head, scale_output = as_kernel_input(q), None, None
        if is_fp8(shape.dtype_q):
            factor, o_scale, by_head = head_scales(self._name, scales, shape.num_qo_heads, shape.num_kv_heads, q.device)
        else:
            q, factor = scaled_query(self._name, q, shape.num_kv_heads, scales[0], scales[1])
            o_scale, scale_output = value_scale(self._name, scales[2], shape.num_qo_heads, shape.num_kv_heads, q.device)
        numbers = numbers_of(logits[2:], factor, q.device)
        cap, scale, rope_scale, rope_theta = logits[2:]
        slopes = planned.parameters[0]  # type: ignore[misc]
        if numbers is None:
            parameters = Parameters(slopes, None, by_head, sinks, scale * factor, cap)
        else:
            rope_scale, rope_theta, parameters = 1.0, 1.0, Parameters(slopes, numbers, by_head, sinks, 1.0, 1.0)
        batch_size, max_items, max_merges, max_slots, tile_rows, slot_rows, items_len, window = sizes[3:]
        torch.ops.flashinfer.attend_planned(
            self._family, op, q, k, v, out, lse, *sizes[:3],
            *arguments._replace(
                float_workspace=None, batch_size=batch_size, max_items=max_items, max_merges=max_merges,
                max_slots=max_slots, tile_rows=tile_rows, slot_rows=slot_rows, token_pos_in_items_len=items_len,
                window_left=window - 1, o_scale=o_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            ),
            *parameters,
        )  # fmt: skip
        if scale_output is not None:
            scale_output(out)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _scaled(
        self, planned: Plan, q: torch.Tensor, extra: tuple[Any, ...], scales: tuple[Scale, Scale, Scale]
    ) -> tuple[torch.Tensor, CallArguments, tuple[Any, ...], Callable[[torch.Tensor], None] | None]:
        """Return query, arguments and parameters of a run with scales, and a function for the output."""
        shape, logits, operators = planned.shape, planned.logits, planned.operators
        if operators.custom:
            for name, scale in (("q_scale", scales[0]), ("k_scale", scales[1])):
                check_none(f"{self._name}.run", name, scale, "the custom variant of jit_args scales its logits")
        eight_bits = is_fp8(shape.dtype_q)
        if eight_bits and len(extra) == 3 and scales == NO_SCALES:
            scales, extra = extra, ()
        if not operators.custom:
            check_no_extra(f"{self._name}.run", extra, " without jit_args")
        if eight_bits:
            factor, o_scale, by_head = head_scales(self._name, scales, shape.num_qo_heads, shape.num_kv_heads, q.device)
            own = parameters_of(logits, shape.num_qo_heads, self.device, factor, scales=by_head)
            return q, planned.arguments._replace(o_scale=o_scale), own, None
        q, factor = scaled_query(self._name, q, shape.num_kv_heads, scales[0], scales[1])
        o_scale, scale_output = value_scale(self._name, scales[2], shape.num_qo_heads, shape.num_kv_heads, q.device)
        if operators.custom:
            return q, planned.arguments._replace(o_scale=o_scale), self._variant_arguments(planned, extra), scale_output
        parameters = parameters_of(logits, shape.num_qo_heads, self.device, factor)
        return q, planned.arguments._replace(o_scale=o_scale), parameters, scale_output

    def _variant_arguments(self, planned: Plan, extra: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the parameters of a custom variant.

        The caller passes either all parameters, or all except those that the wrapper provides.
        """
        names, count = self._variant_parameters
        known = {
            _SLOPES: self._slopes, "maybe_custom_mask": planned.arguments.custom_mask,
            "maybe_mask_indptr": planned.arguments.mask_indptr,
        }  # fmt: skip
        if len(extra) != count - sum(name in known for name in names):
            return extra
        rest = iter(extra)
        return (*(known[name] if name in known else next(rest) for name in names), *rest)
