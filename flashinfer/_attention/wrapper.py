"""The base of the wrappers: a plan bound to an operator once, so that ``run()`` has little left to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.dtypes import is_fp8
from .._ops.scalars import numbers_of
from .._ops.tensors import check_tensor
from ..jit.capture import refuse_capture
from ..jit.module import JitSpec
from ..utils import canonicalize_torch_dtype
from .accepted import BALANCED
from .arguments import (
    Logits,
    PagedCache,
    caches_of,
    check_sinks,
    layout_of,
    logits_of,
    no_gradient,
    parameters_of,
    rows_of,
    variant_of,
)
from .bound import Bound, Result
from .engines import EngineContract
from .events import Events
from .kernels import Wanted, choose
from .lists import Scheduler, Shape
from .masks import MaskTensors
from .operators import Operators, call, custom_operators, named
from .plan import Extent, Options, Plan, Requests, check_inputs, make_plan, refuse_copies, results_of
from .scales import NO_SCALES, Scale, head_scales, scaled_query, value_scale
from .signature import Parameters, Setting
from .streams import LastRun
from .tables import Batch, Tables, check_buffer, refuse_graph
from .traced import from_shape

FIXED_TILE_ROWS = 64  # every configuration of the portable kernels has such tiles


class BatchWrapper(EngineContract):
    """A batch of requests with one plan; see the public wrappers."""

    _family, _backend = "prefill", "auto"
    _paged_buffers: tuple[torch.Tensor | None, ...] = (None, None, None)
    _cut = BALANCED  # of the plan that is being made
    _plan_options: Options  # of the last plan(), whatever forward() was given since

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        generate: Callable[..., JitSpec] | None = None,
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        """With ``jit_args`` the kernels are those of ``generate(*jit_args, device=...)``, a custom variant's."""
        self._name = type(self).__name__
        self._layout = layout_of(self._name, kv_layout)
        self._kv_layout = kv_layout
        self._use_cuda_graph = bool(use_cuda_graph)
        check_tensor(self._name, "float_workspace_buffer", float_workspace_buffer)
        self._scheduler = Scheduler(f"{self._name}.plan", float_workspace_buffer, self._use_cuda_graph)
        self.device = self._scheduler.device
        self._custom, self._dtype_o = None, None
        if generate is not None and jit_args is not None:
            self._custom = custom_operators(generate(*jit_args, device=self.device.type))
            self._dtype_o = canonicalize_torch_dtype(jit_args[3])
        self._last_run, self._events = LastRun(), Events()
        self._forget_plan()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies: they would share the plan and the workspaces."""
        refuse_copies(self._name)

    def _forget_plan(self) -> None:
        self._planned: Plan | None = None
        self._plans: dict[Options, Plan] = {}  # of the same lists
        self._bound: Bound | None = None  # the plan as its module keeps it, for eager calls
        self._seen: tuple[Any, ...] | None = None  # shapes and dtypes that fit the plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if tables are copied to the caller's buffers, for CUDA graphs."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Use other workspaces from now on; plan again before the next run, and capture graphs again.

        Args:
            float_workspace_buffer: for partial results, on the wrapper's device.
            int_workspace_buffer: for plans, on the same device.

        Raises:
            ValueError: another device, or buffers that are not contiguous.
        """
        if isinstance(float_workspace_buffer, torch.Tensor) and float_workspace_buffer.device != self.device:
            raise ValueError(
                f"{self._name}.reset_workspace_buffer: float_workspace_buffer: got one on"
                f" {float_workspace_buffer.device}, wanted {self.device}"
            )
        self._scheduler.reset(float_workspace_buffer, int_workspace_buffer)
        self._forget_plan()

    def _graph_buffer(
        self, name: str, buffer: torch.Tensor | None, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor | None:
        """Return a checked buffer of the constructor, or ``None`` without CUDA graphs."""
        if not self._use_cuda_graph:
            return None
        checked = check_buffer(self._name, name, buffer, dtype)
        if checked.device != self.device:
            raise ValueError(f"{self._name}: {name}: got one on {checked.device}, wanted {self.device}")
        return checked

    def _paged_graph_buffers(self, **buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Check the buffers of indptr, indices and last_page_len, passed by the constructor's names."""
        checked = tuple(self._graph_buffer(name, buffer) for name, buffer in buffers.items())
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf = checked
        (indptr_name, _, last_name), (indptr, _, last) = buffers, checked
        if indptr is not None and last is not None and last.numel() != indptr.numel() - 1:
            raise ValueError(
                f"{self._name}: {last_name}: got {last.numel()} elements, wanted {indptr.numel() - 1}, one less than"
                f" {indptr_name}"
            )
        self._fixed_batch_size = 0 if indptr is None else indptr.numel() - 1
        return checked

    def end_forward(self) -> None:
        """Do nothing; kept for callers of older interfaces."""

    def _operators(self, requests: Requests, options: Options) -> Operators:
        shape, logits, batch = requests.shape, options.logits, requests.batch
        dtypes, head_dims = (shape.dtype_q, shape.dtype_kv, shape.dtype_o), (shape.head_dim_qk, shape.head_dim_vo)
        group = shape.num_qo_heads // shape.num_kv_heads
        wanted = Wanted(
            self._family, self.device, dtypes, head_dims, logits.pos_encoding_mode, logits.logits_soft_cap > 0,
            requests.mask_mode(options), group,
        )  # fmt: skip
        if self._custom is not None:
            if logits.pos_encoding_mode or logits.logits_soft_cap > 0:
                raise ValueError(
                    f"{self._name}.plan: pos_encoding_mode, logits_soft_cap: got one with jit_args, wanted none: a variant"
                    " of your own says itself what becomes of logits"
                )
            choose(self._backend, wanted, 0)
            return self._custom
        backend = "fa2" if requests.cut.is_fixed and self._backend == "auto" else self._backend
        kernels = choose(backend, wanted, (batch.rows - batch.row_start) * group // max(batch.kv_lens.numel(), 1))
        planned, bounds = self._planned, self._scheduler.bounds
        if bounds is not None and planned is not None and bounds.fixed == shape.fixed:
            # Kernels of a captured graph also serve later plans, if they can.
            if wanted.why_not(planned.operators.kernels) is None:
                kernels = planned.operators.kernels
            elif kernels != planned.operators.kernels:
                self._scheduler.bounds = None
        return self._events.operators(self._family, self.device.type, dtypes, head_dims, variant_of(logits), kernels)

    def _plan(
        self, batch: Batch, shape: Shape, logits: Logits, causal: int, masks: MaskTensors, page_size: int | None,
        tables: Tables | None = None, given: Shape | None = None,
    ) -> None:  # fmt: skip
        """Make a plan and keep it; then, when nothing can fail any more, write the caller's buffers."""
        requests = Requests(batch, shape, masks, page_size, self._layout, given, self._cut)
        self._make_and_take(requests, Options(logits, causal))
        if tables is not None:
            tables.commit()

    def _make_and_take(self, requests: Requests, options: Options) -> None:
        planned = self._make(requests, options, requests.extent(options))
        self._plans, self._plan_options = {options: planned}, options
        self._take(planned)
        self._say_plan(planned)

    def _make(self, requests: Requests, options: Options, extent: Extent) -> Plan:
        """Make new lists for the options of a run."""
        refuse_graph()
        try:
            operators = self._operators(requests, options)
        except ValueError as err:
            raise named(f"{self._name}.plan", err) from None
        if self._planned is not None and self._planned.operators.kernels != operators.kernels:
            self._scheduler.bounds = None  # those of other kernels
        self._last_run.wait(self.device, (plan.bound for plan in self._plans.values()))
        problem = requests.shape.problem(requests.batch.qo_indptr, requests.batch.kv_lens)._replace(
            mask_mode=int(extent.causal), window_left=extent.window_left, variant=operators.variant,
            split=requests.cut.split, kv_chunk=requests.cut.kv_chunk, tile_rows=self._tile_rows(requests, operators),
        )  # fmt: skip
        lists = self._scheduler.make(operators.plan, problem)
        return self._with(requests, lists, extent, options, operators)

    def _tile_rows(self, requests: Requests, operators: Operators) -> int:
        """Rows of a tile where they must not depend on the batch; 0 where kernels choose, or have one size alone."""
        portable = operators.kernels in ("cpu", "cuda") and self._family == "prefill"
        return FIXED_TILE_ROWS if requests.cut.is_fixed and portable else 0

    def _with(self, requests: Requests, lists: Any, extent: Extent, options: Options, operators: Operators) -> Plan:
        bounds = self._scheduler.bounds
        # One captured graph serves all plans.
        graph_rows = None if bounds is None or self.device.type != "cuda" else bounds.num_queries
        return make_plan(
            requests, lists, extent, options, operators,
            device=self.device, graph_rows=graph_rows, more_rows=self._use_cuda_graph,
        )  # fmt: skip

    def _take(self, planned: Plan) -> None:
        self._planned, self._bound, self._seen = planned, planned.bound, None
        self._say_options(planned)

    def _use_options(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
        causal: int | None = None,
    ) -> None:
        """:meth:`_use` of the options that the deprecated forward() was given."""
        head_dim = self._planned_or_fail("forward").shape.head_dim_qk
        logits = logits_of(
            f"{self._name}.forward", head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta,
        )  # fmt: skip
        self._use(logits, causal)

    def _use(self, logits: Logits, causal: int | None = None) -> None:
        """Run the requests of the last plan with other options from now on, until the next plan.

        They are arguments of the kernels. New lists are made only where the keys that the options see, or the tiles
        that their kernels have, are not those of the lists there are, which cannot be while a CUDA graph is captured.
        """
        planned = self._planned_or_fail("forward")
        options = Options(logits, planned.options.causal if causal is None else causal)
        if options == planned.options:
            return
        if options not in self._plans:
            refuse_graph()
            self._prepare(planned, options)
        self._take(self._plans[options])

    def _prepare(self, planned: Plan, options: Options) -> None:
        requests, shape = planned.requests, planned.requests.shape
        operators, before = self._operators(requests, options), planned.operators
        problem = shape.problem(None, requests.batch.kv_lens)._replace(variant=operators.variant)
        same_tiles = operators.kernels == before.kernels and (
            operators.variant == before.variant
            or self._scheduler.fits(operators.plan, problem, planned.lists.tile_rows)
        )
        if same_tiles and planned.extent.holds(requests.extent(options)):
            if options.logits.pos_encoding_mode == 2:
                refuse_capture("forward(): slopes of ALiBi would be computed by the graph alone", "call it")
            self._plans[options] = self._with(requests, planned.lists, planned.extent, options, operators)
            return
        refuse_capture("forward(): its options need another plan than there is", "call it, or plan() with them,")
        extent = planned.extent.joined(requests.extent(options))
        self._plans = {options: self._make(requests, options, extent)}

    def _planned_or_fail(self, what: str) -> Plan:
        if self._planned is None:
            raise ValueError(f"{self._name}.{what}: got no plan, wanted a call of plan() before")
        return self._planned

    def _run_paged(
        self,
        q: torch.Tensor,
        paged_kv_cache: PagedCache,
        args: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        if not is_compiling() and not args and sinks is None and (bound := self._bound) is not None:
            k, v = paged_kv_cache, None
            # To ask an instance takes a tensor longer than its type does.
            if type(k) is not torch.Tensor and isinstance(k, (tuple, list)) and len(k) == 2:
                k, v = k
            result = bound.call(q, k, v, scales, out, lse, return_lse)
            if result is not None:
                return result
        k, v = caches_of(f"{self._name}.run", paged_kv_cache, self._layout)
        return self._run(q, k, v, args, scales, out, lse, return_lse, sinks)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None = None,
    ) -> Result:
        planned = self._planned
        if planned is None:
            planned = self._planned_or_fail("run")
        no_gradient(self._name, (q, k, v, sinks, *args), ".run")
        if sinks is not None:
            check_sinks(f"{self._name}.run", sinks, planned.shape.num_qo_heads, self.device, planned.operators.custom)
        if is_dynamo_compiling() and planned.operators.traced:
            return self._run_traced(planned, q, k, v, args, scales, out, lse, return_lse, sinks)
        # Layer after layer brings the same shapes: what was found right once is not looked at again.
        seen = (q.shape, k.shape, v.shape, q.dtype, k.dtype) if isinstance(q, torch.Tensor) else None
        if seen is None or seen != self._seen:
            check_inputs(
                f"{self._name}.run", planned, q, k, v, planned.batch.rows, planned.batch.kv_rows, self._use_cuda_graph
            )
            self._seen = seen
        if not q.is_contiguous() or q.is_cuda:
            q = rows_of(q)
        setting: Setting = planned.setting
        parameters, finish = planned.parameters, None
        if args or planned.operators.custom or scales != NO_SCALES:
            q, setting, parameters, finish = self._scaled(planned, q, args, scales)
        if sinks is not None:
            parameters = cast(Parameters, parameters)._replace(maybe_sinks=sinks)
        out, lse = results_of(f"{self._name}.run", planned.shape, q, out, lse, return_lse)
        self._last_run.note(self.device)
        call(self._name, planned.operators.run, q, k, v, out, lse, *setting, *parameters)
        if finish is not None:
            finish(out)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _run_traced(
        self,
        planned: Plan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_run` under ``torch.compile``: one graph for all plans."""
        op = f"{self._name}.run"
        if args:
            raise TypeError(f"{op}: got {len(args)} more arguments, wanted none without jit_args")
        sizes = from_shape(planned.sizes)
        check_inputs(op, planned, q, k, v, sizes[0], sizes[1], self._use_cuda_graph)
        shape, logits, setting = planned.shape, planned.logits, planned.setting
        out, lse = results_of(op, shape, q, out, lse, return_lse)
        q, by_head, finish = rows_of(q), None, None
        if is_fp8(shape.dtype_q):
            factor, o_scale, by_head = head_scales(self._name, scales, shape.num_qo_heads, shape.num_kv_heads, q.device)
        else:
            q, factor = scaled_query(self._name, q, shape.num_kv_heads, scales[0], scales[1])
            o_scale, finish = value_scale(self._name, scales[2], shape.num_qo_heads, shape.num_kv_heads, q.device)
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
            *setting._replace(
                float_workspace=None, batch_size=batch_size, max_items=max_items, max_merges=max_merges,
                max_slots=max_slots, tile_rows=tile_rows, slot_rows=slot_rows, token_pos_in_items_len=items_len,
                window_left=window - 1, o_scale=o_scale, rope_scale=rope_scale, rope_theta=rope_theta,
            ),
            *parameters,
        )  # fmt: skip
        if finish is not None:
            finish(out)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _scaled(
        self, planned: Plan, q: torch.Tensor, args: tuple[Any, ...], scales: tuple[Scale, Scale, Scale]
    ) -> tuple[torch.Tensor, Setting, tuple[Any, ...], Callable[[torch.Tensor], None] | None]:
        """Return query, setting and parameters of a run with scales, and a function for the output."""
        shape, logits, operators = planned.shape, planned.logits, planned.operators
        if operators.custom and (scales[0] is not None or scales[1] is not None):
            raise ValueError(
                f"{self._name}.run: q_scale, k_scale: got one with jit_args, wanted none: a variant of your own has the"
                " scale of its logits as a parameter"
            )
        eight_bits = is_fp8(shape.dtype_q)
        if eight_bits and len(args) == 3 and scales == NO_SCALES:
            scales, args = args, ()
        if args and not operators.custom:
            raise TypeError(f"{self._name}.run: got {len(args)} more arguments, wanted none without jit_args")
        if eight_bits:
            factor, o_scale, by_head = head_scales(self._name, scales, shape.num_qo_heads, shape.num_kv_heads, q.device)
            own = parameters_of(logits, shape.num_qo_heads, self.device, factor, scales=by_head)
            return q, planned.setting._replace(o_scale=o_scale), own, None
        q, factor = scaled_query(self._name, q, shape.num_kv_heads, scales[0], scales[1])
        o_scale, finish = value_scale(self._name, scales[2], shape.num_qo_heads, shape.num_kv_heads, q.device)
        parameters = args if operators.custom else parameters_of(logits, shape.num_qo_heads, self.device, factor)
        return q, planned.setting._replace(o_scale=o_scale), parameters, finish
