"""Plans of the wrappers: schedule a parsed request, copy lists and tables to the device, and bind calls."""

from __future__ import annotations

from typing import Any

import torch

from .._ops.arguments import check_planned
from ..jit.frozen import refuse_capture
from .accepted import check_kv_lens
from .arguments import CAUSAL, MULTI_ITEM, POS_ENCODINGS, Logits, logits_of, slopes_of, variant_of
from .bound import Bound, LastRun
from .engines import EngineContract
from .events import Events
from .kernels import FEW_ROWS, CallProperties, choose
from .lists import HostPlan, Shape
from .masks import NO_MASK_REQUEST, NO_MASKS, MaskTensors, masks_of
from .operators import Operators, builtin_operators, public_error
from .plan import KeyExtent, Options, Plan, SplitRule, Workload, make_plan
from .request import PlanRequest, key_tables, raise_table_error, tables_on_host
from .signature import HostTables, PlanNumbers
from .tables import Batch, Tables, refuse_graph

FIXED_TILE_ROWS = 64  # rows of a tile that every configuration of the portable kernels supports
MOST_OPTIONS = 64  # cached plans, one per set of options: the next plan with these options reuses the bound calls


class Planner(EngineContract):
    """Base of the wrappers: makes plans.

    A new batch calls ``_schedule``, ``_write_plan``, ``_make_plan``, ``_store_plan`` and ``_activate``, in this order.
    Other options of the same batch call ``_make_plan`` and ``_activate`` if the work lists still fit.
    """

    _family, _backend = "prefill", "auto"
    _q_len_per_req = 1  # queries of each request without qo_indptr
    _needs_slopes = False  # True for a custom variant that declares ALiBi's slopes
    _slopes: torch.Tensor | None = None
    _name: str
    _layout: int
    _use_cuda_graph: bool
    device: torch.device
    _custom: Operators | None
    _last_run: LastRun
    _events: Events
    _plan_options: Options  # of the last plan(). forward() does not change them.

    def _forget_plan(self) -> None:
        self._planned: Plan | None = None
        self._plans: dict[Options, Plan] = {}  # plans of the current workload
        self._former: dict[Options, Plan] = {}  # last plan of each set of options: the next one reuses its bound calls
        self._bound: Bound | None = None  # bound calls of the plan, for eager mode
        self._checked_call: tuple[Any, ...] | None = None  # shapes and dtypes of the last run that was checked
        # Cached kernels and numbers of the last plan, each with its cache key. The next plan usually has the same key.
        self._chosen: tuple[tuple[Any, ...], tuple[CallProperties, str, int], Operators | None] | None = None
        self._plan_numbers: tuple[tuple[Any, ...], PlanNumbers] | None = None

    def _plan_request(self, request: PlanRequest) -> None:
        """Make the plan of a request. Write the caller's buffers last, after all checks."""
        settings, indices = request.settings, request.tables.kv_indices
        host_tables, prefix_len = tables_on_host(request)
        mode = None if request.masks is NO_MASK_REQUEST else request.masks.mode
        options, shape, queries = settings.options, settings.shape, host_tables.qo_indptr
        mean = 1.0
        if queries is not None and (count := queries.numel() - 1) > 0:
            first, end = queries[::count].tolist()
            mean = (end - first) / count
        extent = KeyExtent(
            (options.causal if mode is None else mode) in (CAUSAL, MULTI_ITEM), max(options.logits.window_left, -1)
        )
        operators = self._operators(shape, options, mode, mean, settings.split_rule)
        host_plan = self._schedule(operators, shape, extent, settings.split_rule, settings.page_size or 0, host_tables)
        if host_plan is None:
            raise_table_error(request, host_tables)
        num_queries, first_query, kv_size, kv_start, kv_end = host_plan.ranges
        if indices is not None and indices.numel() < kv_end:
            raise_table_error(request, host_tables)
        if self._q_len_per_req > 1:
            check_kv_lens(request.op, self._q_len_per_req, host_plan.kv_lens)
        tables = Tables(request.op, self.device, request.non_blocking)
        kv_indptr, kv_indices = key_tables(self._scheduler, host_plan, tables, request)
        if queries is not None:
            queries = queries.clone()  # gradients read the table after the caller may have changed it
        batch = Batch(num_queries, queries, host_plan.kv_lens, kv_size, kv_indptr, kv_indices, kv_start, first_query)
        masks = NO_MASKS
        if mode is not None:
            masks = masks_of(tables, batch, request.masks, prefix_len, self._use_cuda_graph)
        workload = Workload(
            batch, shape, masks, settings.page_size, self._layout, request.run_shape, settings.split_rule
        )
        self._store_plan(self._write_plan(host_plan, workload, options, extent, operators))
        tables.commit()

    def _plan(
        self, batch: Batch, shape: Shape, logits: Logits, causal: int, masks: MaskTensors, page_size: int
    ) -> None:
        """Make the plan of a batch with tables on the device and known lengths."""
        workload = Workload(batch, shape, masks, page_size, self._layout)
        self._replan(workload, Options(logits, causal))

    def _replan(self, workload: Workload, options: Options) -> None:
        """Schedule a workload again."""
        refuse_graph()
        self._store_plan(self._reschedule(workload, options, workload.extent(options)))

    def _reschedule(self, workload: Workload, options: Options, extent: KeyExtent) -> Plan:
        batch, shape = workload.batch, workload.shape
        operators = self._operators_of(workload, options)
        host_tables = HostTables(batch.qo_indptr, batch.kv_lens)
        host_plan = self._schedule(operators, shape, extent, workload.split_rule, 0, host_tables)
        if host_plan is None:
            raise ValueError(f"{self._name}.plan: got a negative length, or an indptr that is negative or decreases")
        workload = workload._replace(batch=self._copy_tables(batch))
        return self._write_plan(host_plan, workload, options, extent, operators)

    def _copy_tables(self, batch: Batch) -> Batch:
        """Copy tables out of the workspace, because new work lists overwrite them."""
        indptr, indices = batch.kv_indptr, batch.kv_indices
        workspace = self._scheduler.int_workspace.untyped_storage()
        if indptr.untyped_storage().data_ptr() != workspace.data_ptr():
            return batch
        return batch._replace(kv_indptr=indptr.clone(), kv_indices=None if indices is None else indices.clone())

    def _schedule(
        self,
        operators: Operators,
        shape: Shape,
        extent: KeyExtent,
        split_rule: SplitRule,
        page_size: int,
        host_tables: HostTables,
    ) -> HostPlan | None:
        planned = self._planned
        if planned is not None and planned.operators.kernels != operators.kernels:
            self._scheduler.graph_sizes = None  # they hold for one kind of kernels
        # The portable kernels of prefill select the rows of a tile by batch. All other kernels have one size.
        is_fixed = split_rule.is_fixed and self._family == "prefill" and operators.kernels in ("cpu", "cuda")
        key = (shape, extent, split_rule, page_size, operators.variant, is_fixed, self._scheduler.device_index)
        if self._plan_numbers is None or self._plan_numbers[0] != key:
            self._plan_numbers = key, shape.plan_numbers(
                int(extent.causal), extent.window_left, self._scheduler.device_index, 0, 0,
                FIXED_TILE_ROWS if is_fixed else 0, int(split_rule.split), split_rule.kv_chunk, operators.variant,
                page_size,
            )  # fmt: skip
        return self._scheduler.make(operators.plan, self._plan_numbers[1], host_tables)

    def _write_plan(
        self, host_plan: HostPlan, workload: Workload, options: Options, extent: KeyExtent, operators: Operators
    ) -> Plan:
        """Wait for the runs of the last plan, then overwrite its work lists on the device."""
        if self.device.type == "cuda":
            self._last_run.wait(self.device, (plan.bound for plan in self._plans.values()))
        return self._make_plan(workload, self._scheduler.write(host_plan), extent, options, operators)

    def _make_plan(
        self, workload: Workload, lists: Any, extent: KeyExtent, options: Options, operators: Operators
    ) -> Plan:
        graph_sizes = self._scheduler.graph_sizes
        # One captured graph serves all plans.
        graph_queries = None if graph_sizes is None or self.device.type != "cuda" else graph_sizes.num_queries
        planned = make_plan(
            workload, lists, extent, options, operators, self._former.get(options),
            device=self.device, graph_queries=graph_queries, allows_more_queries=self._allows_more_queries,
        )  # fmt: skip
        if len(self._former) >= MOST_OPTIONS:
            self._former.clear()
        self._former[options] = planned
        return planned

    @property
    def _allows_more_queries(self) -> bool:
        """True if a run may have more queries than its plan."""
        return self._use_cuda_graph and self._q_len_per_req == 1

    def _store_plan(self, planned: Plan) -> None:
        if self._needs_slopes:
            # Slopes are computed on the device, because a CUDA graph cannot capture a copy from the host.
            logits = planned.logits._replace(pos_encoding_mode=POS_ENCODINGS["ALIBI"])
            self._slopes = slopes_of(logits, planned.shape.num_qo_heads, self.device)
        self._plans, self._plan_options = {planned.options: planned}, planned.options
        self._activate(planned)
        self._export_plan(planned)

    def _activate(self, planned: Plan) -> None:
        self._planned, self._bound, self._checked_call = planned, planned.bound, None
        self._export_options(planned)

    def _operators_of(self, workload: Workload, options: Options) -> Operators:
        batch = workload.batch
        mean = (batch.num_queries - batch.first_query) / max(batch.kv_lens.numel(), 1)
        return self._operators(workload.shape, options, workload.masks.mode, mean, workload.split_rule)

    def _operators(
        self, shape: Shape, options: Options, mode: int | None, mean: float, split_rule: SplitRule
    ) -> Operators:
        """Return the operators of a plan.

        ``mode`` is that of a custom or multi-item mask. ``None``: the options decide between causal and no mask.
        ``mean`` is the mean number of queries of a request.
        """
        logits, group = options.logits, shape.num_qo_heads // shape.num_kv_heads
        dtypes, head_dims = (shape.dtype_q, shape.dtype_kv, shape.dtype_o), (shape.head_dim_qk, shape.head_dim_vo)
        rows, events = int(mean * group), self._events
        planned, graph_sizes = self._planned, self._scheduler.graph_sizes
        key = (
            shape,
            options,
            mode,
            rows <= FEW_ROWS,
            split_rule,
            self._backend,
            events.enabled,
            events.attached is None,
        )
        if self._chosen is None or self._chosen[0] != key:
            call = CallProperties(
                self._family, self.device, dtypes, head_dims, logits.pos_encoding_mode, logits.logits_soft_cap > 0,
                options.causal if mode is None else mode, group,
            )  # fmt: skip
            backend = "fa2" if split_rule.is_fixed and self._backend == "auto" else self._backend
            self._chosen = key, (call, self._kernels(backend, call, rows), variant_of(logits)), self._custom
        _, chosen, operators = self._chosen
        if operators is not None and (graph_sizes is None or planned is None or planned.operators is operators):
            return operators
        call, kernels, variant = chosen
        if graph_sizes is not None and planned is not None and graph_sizes.fixed == shape.plan_numbers().fixed:
            # Later plans use the kernels of the captured graph if these support the call.
            if call.unsupported_reason(planned.operators.kernels) is None:
                kernels = planned.operators.kernels
            elif kernels != planned.operators.kernels:
                self._scheduler.graph_sizes = None
        try:
            select = builtin_operators if not events.enabled and events.attached is None else events.operators
            operators = select(self._family, self.device.type, dtypes, head_dims, variant, kernels)
        except ValueError as err:
            raise public_error(f"{self._name}.plan", err) from None
        if kernels == chosen[1]:
            self._chosen = key, chosen, operators
        return operators

    def _kernels(self, backend: str, call: CallProperties, rows: int) -> str:
        """Return the kernels of a plan, ``""`` for a custom variant."""
        try:
            if self._custom is None:
                return choose(backend, call, rows)
            if call.pos_encoding_mode or call.use_logits_soft_cap:
                raise ValueError(
                    f"{self._name}.plan: pos_encoding_mode, logits_soft_cap: got one with jit_args, wanted none:"
                    " a custom variant computes its own logits"
                )
            choose(self._backend, call, 0)
            return ""
        except ValueError as err:
            raise public_error(f"{self._name}.plan", err) from None

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
        """Call :meth:`_use_logits` with the options of the deprecated forward()."""
        head_dim = self._planned_or_fail("forward").shape.head_dim_qk
        logits = logits_of(
            f"{self._name}.forward", head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta,
        )  # fmt: skip
        self._use_logits(logits, causal)

    def _use_logits(self, logits: Logits, causal: int | None = None) -> None:
        """Change the options of all runs until the next plan.

        Options are arguments of the kernels. New work lists are made only if the current ones lack visible keys or
        have tiles of another size. During the capture of a CUDA graph, new work lists are an error.
        """
        planned = self._planned_or_fail("forward")
        options = Options(logits, planned.options.causal if causal is None else causal)
        if options == planned.options:
            return
        if options not in self._plans:
            refuse_graph()
            self._prepare_options(planned, options)
        self._activate(self._plans[options])

    def _prepare_options(self, planned: Plan, options: Options) -> None:
        workload, extent = planned.workload, planned.workload.extent(options)
        operators, before = self._operators_of(workload, options), planned.operators
        same_tiles = operators.kernels == before.kernels and (
            operators.variant == before.variant
            or self._scheduler.supports_tile(
                operators.plan,
                workload.shape.plan_numbers()._replace(variant=operators.variant),
                planned.lists.tile_rows,
            )
        )
        if same_tiles and planned.extent.contains(extent):
            if options.logits.pos_encoding_mode == 2:
                refuse_capture("forward() would compute the slopes of ALiBi for the first time", "call it")
            self._plans[options] = self._make_plan(workload, planned.lists, planned.extent, options, operators)
            return
        refuse_capture("forward(): its options need a new plan", "call it, or plan() with these options,")
        self._plans = {options: self._reschedule(workload, options, planned.extent.union(extent))}

    def _planned_or_fail(self, what: str) -> Plan:
        return check_planned(f"{self._name}.{what}", self._planned)
