"""Plans of the wrappers.

The planner schedules a parsed request, copies lists and tables to the device, and binds calls to them.
"""

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
from .operators import Operators, builtin_operators, named
from .plan import Extent, Options, Plan, Requests, SplitRule, make_plan
from .request import PlanRequest, bad_tables, key_tables, near_tables
from .signature import HostTables, PlanNumbers
from .tables import Batch, Tables, refuse_graph

FIXED_TILE_ROWS = 64  # every configuration of the portable kernels has such tiles
MOST_OPTIONS = 64  # options whose last plan is kept, so that the next plan reuses its bound calls


class Planner(EngineContract):
    """Base of the wrappers: makes plans."""

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
        self._plans: dict[Options, Plan] = {}  # plans with the same lists
        self._former: dict[Options, Plan] = {}  # the last plan per options. The next one reuses its bound calls.
        self._bound: Bound | None = None  # bound calls of the plan, for eager mode
        self._seen: tuple[Any, ...] | None = None  # shapes and dtypes that fit the plan
        # Kernels and numbers of the last plan, each with its inputs. The next plan usually has the same inputs.
        self._chosen: tuple[tuple[Any, ...], tuple[CallProperties, str, int], Operators | None] | None = None
        self._plan_numbers: tuple[tuple[Any, ...], PlanNumbers] | None = None

    def _compile(self, request: PlanRequest) -> None:
        """Make the plan of a request. Write the caller's buffers last, after every possible error."""
        kind, given = request.kind, request.tables
        near, prefix_len = near_tables(request)
        mode = None if request.masks is NO_MASK_REQUEST else request.masks.mode
        options, shape, queries = kind.options, kind.shape, near.qo_indptr
        mean = 1.0
        if queries is not None and (count := queries.numel() - 1) > 0:
            first, end = queries[::count].tolist()
            mean = (end - first) / count
        extent = Extent(
            (options.causal if mode is None else mode) in (CAUSAL, MULTI_ITEM), max(options.logits.window_left, -1)
        )
        operators = self._operators(shape, options, mode, mean, kind.split_rule)
        host_plan = self._make(operators, shape, extent, kind.split_rule, kind.page_size or 0, near)
        if host_plan is None:
            bad_tables(request, near)
        rows, row_start, kv_rows, kv_start, kv_end = host_plan.extent
        if given.kv_indices is not None and given.kv_indices.numel() < kv_end:
            bad_tables(request, near)
        if self._q_len_per_req > 1:
            check_kv_lens(request.op, self._q_len_per_req, host_plan.kv_lens)
        tables = Tables(request.op, self.device, request.non_blocking)
        kv_indptr, kv_indices = key_tables(self._scheduler, host_plan, tables, request)
        if queries is not None:
            queries = queries.clone()  # gradients read the table later: the caller may change it
        batch = Batch(rows, queries, host_plan.kv_lens, kv_rows, kv_indptr, kv_indices, kv_start, row_start)
        masks = NO_MASKS
        if mode is not None:
            masks = masks_of(tables, batch, request.masks, prefix_len, self._use_cuda_graph)
        requests = Requests(batch, shape, masks, kind.page_size, self._layout, request.run_shape, kind.split_rule)
        self._keep(self._write(host_plan, requests, options, extent, operators))
        tables.commit()

    def _plan(
        self, batch: Batch, shape: Shape, logits: Logits, causal: int, masks: MaskTensors, page_size: int
    ) -> None:
        """Make the plan of a batch with tables on the device and known lengths."""
        requests = Requests(batch, shape, masks, page_size, self._layout)
        self._replan(requests, Options(logits, causal))

    def _replan(self, requests: Requests, options: Options) -> None:
        """Make new lists of requests."""
        refuse_graph()
        self._keep(self._make_again(requests, options, requests.extent(options)))

    def _make_again(self, requests: Requests, options: Options, extent: Extent) -> Plan:
        batch, shape = requests.batch, requests.shape
        operators = self._operators_of(requests, options)
        near = HostTables(batch.qo_indptr, batch.kv_lens)
        host_plan = self._make(operators, shape, extent, requests.split_rule, 0, near)
        if host_plan is None:
            raise ValueError(f"{self._name}.plan: got negative lengths, or offsets that are negative or fall")
        requests = requests._replace(batch=self._keep_tables(batch))
        return self._write(host_plan, requests, options, extent, operators)

    def _keep_tables(self, batch: Batch) -> Batch:
        """Copy tables that lie in the workspace, because new lists without tables overwrite them."""
        indptr, indices = batch.kv_indptr, batch.kv_indices
        workspace = self._scheduler.int_workspace.untyped_storage()
        if indptr.untyped_storage().data_ptr() != workspace.data_ptr():
            return batch
        return batch._replace(kv_indptr=indptr.clone(), kv_indices=None if indices is None else indices.clone())

    def _make(
        self,
        operators: Operators,
        shape: Shape,
        extent: Extent,
        split_rule: SplitRule,
        page_size: int,
        near: HostTables,
    ) -> HostPlan | None:
        planned = self._planned
        if planned is not None and planned.operators.kernels != operators.kernels:
            self._scheduler.bounds = None  # they belong to other kernels
        # Rows of a tile must not depend on the batch. Other kernels choose them, or have one size only.
        is_fixed = split_rule.is_fixed and self._family == "prefill" and operators.kernels in ("cpu", "cuda")
        key = (shape, extent, split_rule, page_size, operators.variant, is_fixed, self._scheduler.device_index)
        if self._plan_numbers is None or self._plan_numbers[0] != key:
            self._plan_numbers = key, shape.plan_numbers(
                int(extent.causal), extent.window_left, self._scheduler.device_index, 0, 0,
                FIXED_TILE_ROWS if is_fixed else 0, int(split_rule.split), split_rule.kv_chunk, operators.variant, page_size,
            )  # fmt: skip
        return self._scheduler.make(operators.plan, self._plan_numbers[1], near)

    def _write(
        self, host_plan: HostPlan, requests: Requests, options: Options, extent: Extent, operators: Operators
    ) -> Plan:
        """Copy lists to the device. Wait for the runs of the last plan, whose lists are overwritten."""
        if self.device.type == "cuda":
            self._last_run.wait(self.device, (plan.bound for plan in self._plans.values()))
        return self._with(requests, self._scheduler.write(host_plan), extent, options, operators)

    def _with(self, requests: Requests, lists: Any, extent: Extent, options: Options, operators: Operators) -> Plan:
        bounds = self._scheduler.bounds
        # One captured graph serves all plans.
        graph_rows = None if bounds is None or self.device.type != "cuda" else bounds.num_queries
        planned = make_plan(
            requests, lists, extent, options, operators, self._former.get(options),
            device=self.device, graph_rows=graph_rows,
            more_rows=self._more_rows,
        )  # fmt: skip
        if len(self._former) >= MOST_OPTIONS:
            self._former.clear()
        self._former[options] = planned
        return planned

    @property
    def _more_rows(self) -> bool:
        """True if a run may bring more queries than were planned."""
        return self._use_cuda_graph and self._q_len_per_req == 1

    def _keep(self, planned: Plan) -> None:
        if self._needs_slopes:
            # A CUDA graph cannot capture their copy from the host.
            logits = planned.logits._replace(pos_encoding_mode=POS_ENCODINGS["ALIBI"])
            self._slopes = slopes_of(logits, planned.shape.num_qo_heads, self.device)
        self._plans, self._plan_options = {planned.options: planned}, planned.options
        self._take(planned)
        self._say_plan(planned)

    def _take(self, planned: Plan) -> None:
        self._planned, self._bound, self._seen = planned, planned.bound, None
        self._say_options(planned)

    def _operators_of(self, requests: Requests, options: Options) -> Operators:
        batch = requests.batch
        mean = (batch.rows - batch.row_start) / max(batch.kv_lens.numel(), 1)
        return self._operators(requests.shape, options, requests.masks.mode, mean, requests.split_rule)

    def _operators(
        self, shape: Shape, options: Options, mode: int | None, mean: float, split_rule: SplitRule
    ) -> Operators:
        """Return the operators of a plan. ``mode``: mask mode other than causal. ``mean``: mean queries of a request."""
        logits, group = options.logits, shape.num_qo_heads // shape.num_kv_heads
        dtypes, head_dims = (shape.dtype_q, shape.dtype_kv, shape.dtype_o), (shape.head_dim_qk, shape.head_dim_vo)
        rows, events = int(mean * group), self._events
        planned, bounds = self._planned, self._scheduler.bounds
        key = (
            shape,
            options,
            mode,
            rows <= FEW_ROWS,
            split_rule,
            self._backend,
            events.wanted,
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
        if operators is not None and (bounds is None or planned is None or planned.operators is operators):
            return operators
        call, kernels, variant = chosen
        if bounds is not None and planned is not None and bounds.fixed == shape.plan_numbers().fixed:
            # Kernels of a captured graph also serve later plans, if they can.
            if call.why_not(planned.operators.kernels) is None:
                kernels = planned.operators.kernels
            elif kernels != planned.operators.kernels:
                self._scheduler.bounds = None
        try:
            select = builtin_operators if not events.wanted and events.attached is None else events.operators
            operators = select(self._family, self.device.type, dtypes, head_dims, variant, kernels)
        except ValueError as err:
            raise named(f"{self._name}.plan", err) from None
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
                    f"{self._name}.plan: pos_encoding_mode, logits_soft_cap: got one with jit_args, wanted none: a custom"
                    " variant transforms its logits itself"
                )
            choose(self._backend, call, 0)
            return ""
        except ValueError as err:
            raise named(f"{self._name}.plan", err) from None

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
        """Call :meth:`_use` with the options of the deprecated forward()."""
        head_dim = self._planned_or_fail("forward").shape.head_dim_qk
        logits = logits_of(
            f"{self._name}.forward", head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale,
            rope_theta,
        )  # fmt: skip
        self._use(logits, causal)

    def _use(self, logits: Logits, causal: int | None = None) -> None:
        """Run the requests of the last plan with other options from now on, until the next plan.

        Options are arguments of the kernels. The plan gets new lists only if the current ones lack visible keys or
        have tiles of another size. New lists are an error during the capture of a CUDA graph.
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
        requests, extent = planned.requests, planned.requests.extent(options)
        operators, before = self._operators_of(requests, options), planned.operators
        same_tiles = operators.kernels == before.kernels and (
            operators.variant == before.variant
            or self._scheduler.fits(
                operators.plan,
                requests.shape.plan_numbers()._replace(variant=operators.variant),
                planned.lists.tile_rows,
            )
        )
        if same_tiles and planned.extent.holds(extent):
            if options.logits.pos_encoding_mode == 2:
                refuse_capture("forward(): slopes of ALiBi would be computed by the graph alone", "call it")
            self._plans[options] = self._with(requests, planned.lists, planned.extent, options, operators)
            return
        refuse_capture("forward(): its options need another plan than there is", "call it, or plan() with them,")
        self._plans = {options: self._make_again(requests, options, planned.extent.joined(extent))}

    def _planned_or_fail(self, what: str) -> Plan:
        return check_planned(f"{self._name}.{what}", self._planned)
