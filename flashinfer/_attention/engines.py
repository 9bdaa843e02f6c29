"""Contract with serving engines: attributes of the wrappers that engines use in addition to public methods.

SGLang, vLLM, TensorRT-LLM and mini-sglang use these names of FlashInfer's wrappers.
tests/integrations/test_contract.py checks them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .._ops.arguments import check_as_planned, check_present
from .._ops.indices import check_offsets
from .._ops.numbers import check_range
from ..utils import canonicalize_torch_dtype
from .accepted import check_kv_lens, split_rule_of
from .arguments import CAUSAL, NON_CAUSAL, POS_ENCODINGS
from .lists import Scheduler
from .plan import Options, Plan
from .tables import Batch, check_indices, on_host, paged_kv_lens

Wrapper = Any  # a BatchWrapper, whose base is defined here
_MODES = tuple(POS_ENCODINGS)


class EngineContract:
    """Private attributes of the wrappers that engines read or set.

    Attributes:
        _window_left, _logits_soft_cap, _sm_scale, _causal, _pos_encoding_mode, _rope_scale, _rope_theta: options of the
            last ``plan()`` or ``forward()``. A cap of 0.0 means no cap. A plan overwrites assignments.
        _paged_kv_indptr_buf, _paged_kv_indices_buf, _paged_kv_last_page_len_buf: with CUDA graphs the buffers, which
            engines write between replays. Without, the tables of the last plan, which engines may replace before
            ``_cached_module.plan``.
        _qo_indptr_buf, _custom_mask_buf, _mask_indptr_buf: buffers of a CUDA graph, ``None`` without.
        _float_workspace_buffer: workspace of partial states.
        _int_workspace_buffer: workspace of plans. It may be set before a plan. Wrappers may share one: each plan then
            invalidates the plans of the others.
        _pin_memory_int_workspace_buffer: empty, because each plan allocates its pinned memory.
        _fixed_batch_size: number of requests in a CUDA graph, 0 without a graph.
        _max_total_num_rows: largest number of queries of a captured CUDA graph, ``None`` before the first plan.
        _kv_lens_buffer: lengths of keys of the last plan, on the device.
        _backend: ``"auto"``, ``"fa2"`` or ``"fa3"``. It may be set before a plan.
        _jit_module: operators of ``jit_args``, or ``None``.
        _plan_info: header of the last plan's work lists, for internal use.
        _cached_module: :class:`CachedModule` with ``plan()``, ``None`` before the first plan.
    """

    _window_left: int = -1
    _logits_soft_cap: float = 0.0
    _sm_scale: float | None = None
    _causal: bool = False
    _pos_encoding_mode: str = "NONE"
    _rope_scale: float | None = None
    _rope_theta: float | None = None
    _paged_kv_indptr_buf: torch.Tensor | None = None
    _paged_kv_indices_buf: torch.Tensor | None = None
    _paged_kv_last_page_len_buf: torch.Tensor | None = None
    _qo_indptr_buf: torch.Tensor | None = None
    _custom_mask_buf: torch.Tensor | None = None
    _mask_indptr_buf: torch.Tensor | None = None
    _fixed_batch_size: int = 0
    _plan_info: list[int] | None = None
    _cached_module: CachedModule | None = None

    _scheduler: Scheduler
    _planned: Plan | None

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._scheduler.float_workspace

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        return self._scheduler.int_workspace

    @_int_workspace_buffer.setter
    def _int_workspace_buffer(self, buffer: torch.Tensor) -> None:
        self._scheduler.reset(self._scheduler.float_workspace, buffer)

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def _max_total_num_rows(self) -> int | None:
        graph_sizes = self._scheduler.graph_sizes
        return None if graph_sizes is None else graph_sizes.num_queries

    @property
    def _kv_lens_buffer(self) -> torch.Tensor | None:
        if self._planned is None:
            return None
        return self._scheduler.kv_lens_of(self._planned.lists)

    @property
    def _jit_module(self) -> Any:
        custom = getattr(self, "_custom", None)
        return None if custom is None else custom.namespace

    def _export_options(self, planned: Plan) -> None:
        logits = planned.options.logits
        self._window_left, self._logits_soft_cap, self._sm_scale = logits[1:4]
        self._rope_scale, self._rope_theta = logits[4:]
        self._pos_encoding_mode, self._causal = _MODES[logits.pos_encoding_mode], planned.options.causal == CAUSAL

    def _export_plan(self, planned: Plan) -> None:
        self._plan_info = list(self._scheduler.header)
        batch = planned.workload.batch
        if batch.kv_indices is not None:
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = batch.kv_indptr, batch.kv_indices
        if self._cached_module is None:
            self._cached_module = CachedModule(self)


class ReplanArguments(NamedTuple):
    """Arguments of ``_cached_module.plan``, with tables on the host."""

    qo_indptr: torch.Tensor | None
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor | None
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    head_dims: tuple[int, int]
    causal: bool | None = None
    window_left: int | None = None
    logits_soft_cap: float | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False


class CachedModule:
    """``_cached_module`` of a wrapper. Its ``plan()`` schedules new lengths for tables that are on the device.

    Engines call it instead of the wrapper's ``plan()`` after the first plan. Before the call they write the wrapper's
    buffers (CUDA graphs) or replace its tables. Options of the wrapper's last ``plan()`` apply.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = weakref.ref(wrapper)

    def plan(self, *args: Any) -> list[int]:
        """Plan with positional arguments in one of FlashInfer's forms.

        The first three arguments are workspaces, which are ignored, because the wrapper has its own. The rest has one
        of these forms:

        - 15 to 20 arguments, for tensor cores: qo_indptr, kv_indptr, kv_lens, rows, batch_size, num_qo_heads,
          num_kv_heads, page_size, graph, head_dim_qk, head_dim_vo, causal; then window_left,
          fixed_split_size, disable_split_kv and two more,
        - 15 arguments, without tensor cores: indptr, batch_size, num_qo_heads, num_kv_heads, page_size, graph,
          window_left, logits_soft_cap, head_dim_qk, head_dim_vo, and two empty tensors of the dtypes.

        Returns:
            The wrapper's ``_plan_info``.

        Raises:
            TypeError: another number of arguments.
            ValueError: sizes other than those of the wrapper's plan, or tables that do not fit each other.
        """
        wrapper = self._wrapper()
        op = "_cached_module.plan"
        wrapper = check_present(op, "wrapper", wrapper, "one that is alive")
        op = f"{wrapper._name}.{op}"
        return replan(op, wrapper, _parse_arguments(op, args))


def _parse_arguments(op: str, args: tuple[Any, ...]) -> ReplanArguments:
    rest = args[3:]
    if len(args) == 15 and not isinstance(rest[1], torch.Tensor):
        indptr, batch_size, heads, kv_heads, page_size, _, window, cap, dim_qk, dim_vo, *_ = rest
        return ReplanArguments(
            None, indptr, None, batch_size, heads, kv_heads, page_size, (dim_qk, dim_vo), None, window, cap
        )
    if 15 <= len(args) <= 20:
        qo_indptr, indptr, kv_lens, _, batch_size, heads, kv_heads, page_size, _, dim_qk, dim_vo, causal = rest[:12]
        window, size, disable = (*rest[12:15], None, None, False)[:3] if len(rest) < 15 else rest[12:15]
        return ReplanArguments(
            qo_indptr, indptr, kv_lens, batch_size, heads, kv_heads, page_size, (dim_qk, dim_vo), causal, window, None,
            size, bool(disable),
        )  # fmt: skip
    raise TypeError(f"{op}: got {len(args)} arguments, wanted 15 to 20")


def replan(op: str, wrapper: Wrapper, arguments: ReplanArguments) -> list[int]:
    """Schedule the tables in the wrapper's buffers; see :class:`CachedModule`."""
    planned = wrapper._planned_or_fail("_cached_module.plan")
    workload, shape = planned.workload, planned.workload.shape
    sizes = (shape.num_qo_heads, shape.num_kv_heads, workload.page_size, (shape.head_dim_qk, shape.head_dim_vo))
    got = (arguments.num_qo_heads, arguments.num_kv_heads, arguments.page_size, arguments.head_dims)
    check_as_planned(op, "heads, page_size and head_dims", got, sizes)
    batch = _batch_of(op, wrapper, arguments)
    options = wrapper._plan_options
    logits = options.logits
    if arguments.window_left is not None:
        logits = logits._replace(window_left=int(arguments.window_left))
    causal = options.causal if arguments.causal is None else CAUSAL if arguments.causal else NON_CAUSAL
    if wrapper._q_len_per_req > 1 or wrapper._family == "decode":
        causal = options.causal
    split_rule = workload.split_rule
    if arguments.fixed_split_size is not None or arguments.disable_split_kv:
        split_rule = split_rule_of(op, arguments.fixed_split_size, arguments.disable_split_kv, arguments.page_size)
    wrapper._replan(workload._replace(batch=batch, split_rule=split_rule), Options(logits, causal))
    return wrapper._plan_info or []


def _batch_of(op: str, wrapper: Wrapper, arguments: ReplanArguments) -> Batch:
    indptr, indices = wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf
    indptr = check_present(op, "paged_kv_indptr", indptr, "the tables of a paged cache")
    indices = check_present(op, "paged_kv_indices", indices, "the tables of a paged cache")
    host_indptr = arguments.kv_indptr
    first, used = check_offsets(op, "kv_indptr", host_indptr, arguments.batch_size)
    if fixed := wrapper._fixed_batch_size:
        check_range(op, "batch_size", arguments.batch_size, fixed, fixed, why=" as the buffers for CUDA graphs have")
    if arguments.kv_lens is not None:
        kv_lens = arguments.kv_lens.to(torch.int32)
    elif arguments.page_size == 1:
        kv_lens = host_indptr.diff()
    else:
        (last,) = on_host(wrapper._paged_kv_last_page_len_buf)
        kv_lens = paged_kv_lens(op, "last_page_len", host_indptr, last, arguments.page_size)
    if wrapper._q_len_per_req > 1:
        check_kv_lens(op, wrapper._q_len_per_req, kv_lens)
    qo_indptr = None
    if wrapper._q_len_per_req > 1:
        qo_indptr = equal_offsets(arguments.batch_size, wrapper._q_len_per_req)
    elif wrapper._family != "decode" and arguments.qo_indptr is not None:
        qo_indptr = arguments.qo_indptr.clone()
        check_offsets(op, "qo_indptr", qo_indptr, arguments.batch_size)
    first_query, num_queries = (0, arguments.batch_size) if qo_indptr is None else qo_indptr[[0, -1]].tolist()
    pages = check_indices(op, "indices", indices, "kv_indptr", first, used)
    device = wrapper.device
    return Batch(num_queries, qo_indptr, kv_lens, pages, indptr.to(device), indices.to(device), first_query=first_query)


def equal_offsets(batch_size: int, q_len_per_req: int) -> torch.Tensor:
    """Return ``qo_indptr`` of requests with equally many queries, on the host."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device="cpu").mul_(q_len_per_req)


def fast_decode_plan(
    self: Any,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan as :meth:`flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan` does, without reading the device.

    Args:
        self: the wrapper. Engines install ``partial(fast_decode_plan, wrapper)`` as its ``begin_forward``.
        global_override_indptr_cpu: ``indptr`` on the host, if ``indptr`` is on the device.
        indptr, ...: every other argument as for ``plan()``. With pages of one token ``last_page_len`` is not read.
            ``indices`` in the wrapper's buffer are not copied. With the queries' dtype of the last plan, the output
            also keeps its dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as ``plan()``. Several queries per request need a prior plan, because
            the first plan fixes the shape of a graph.
    """
    if q_len_per_req != 1 and self._planned is None:
        raise ValueError(
            f"fast_decode_plan: q_len_per_req: got {q_len_per_req} without a prior plan, wanted plan() first"
        )
    host_indptr = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    if page_size == 1 and last_page_len.device.type != "cpu":
        last_page_len = torch.ones(len(last_page_len), dtype=torch.int32, device="cpu")
    planned, o_data_type = self._planned, None
    if planned is not None:
        shape, dtype = planned.shape, q_data_type or data_type or "float16"
        if shape.dtype_q == (dtype if type(dtype) is torch.dtype else canonicalize_torch_dtype(dtype)):
            o_data_type = shape.dtype_o
    # An engine may install this function as the instance's own plan().
    type(self).plan(
        self, host_indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
        window_left, logits_soft_cap, q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta,
        non_blocking, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req, o_data_type=o_data_type,
    )  # fmt: skip
