"""Base of the wrappers of MLA: a plan of a batch over a cache of latents, and its runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from .._attention.accepted import default_rule
from .._attention.arguments import as_kernel_input, no_gradient
from .._attention.bound import LastRun
from .._attention.lists import Scheduler
from .._attention.plan import NoCopies
from .._attention.planner import FIXED_TILE_ROWS
from .._attention.request import cached_by_value
from .._attention.signature import HostTables, PlanNumbers
from .._attention.tables import INT32_MAX, Tables, check_batch_size, check_indices, on_host
from .._ops.arguments import check_as_planned
from .._ops.dtypes import dtype_of
from .._ops.errors import value_error
from .._ops.indices import check_each, check_offsets, index_table
from .._ops.numbers import check_range, positive, positive_real
from .._ops.sizes import exceeds
from .._ops.tensors import check_count, check_device, check_dims, check_metadata, check_tensor, check_vector
from .._profiler.buffer import Attached, checked_buffer
from ..jit.modules.mla import HEAD_DIM_CKV, HEAD_DIM_KPE, check_head_dims
from .arguments import MOST_SCALE, UNSCALED, Scales
from .operators import Operators, check_dtype, operators_for, run_for_scales


@dataclass(frozen=True)
class Plan:
    """Batch of requests, ready to run."""

    operators: Operators
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    lists: torch.Tensor
    sizes: torch.Tensor  # on the host: the most items, merges and slots, rows of a tile and of a slot
    num_heads: int
    page_size: int
    causal: bool
    sm_scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rows: torch.Tensor  # [queries, 0], whose size a graph treats as symbolic
    pages: int  # number of pages that tables on the host name
    no_rope: torch.Tensor | None  # bytes of zeros that kernels read as rotary parts, if head_dim_kpe is 0


class MlaWrapper(NoCopies):
    """Batch of requests with one plan; see the public wrappers."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool,
        backend: str,
        **buffers: torch.Tensor | None,
    ) -> None:
        self._name = type(self).__name__
        self._use_cuda_graph, self._backend = bool(use_cuda_graph), backend
        self._default_rule = default_rule(not self._use_cuda_graph)
        check_tensor(self._name, "float_workspace_buffer", float_workspace_buffer)
        self._scheduler = Scheduler(f"{self._name}.plan", float_workspace_buffer, self._use_cuda_graph)
        self.device = self._scheduler.device
        operators_for(self._name, self.device, backend)
        self._buffers: dict[str, torch.Tensor | None] = dict.fromkeys(buffers)
        if self._use_cuda_graph:
            self._buffers = {name: self._buffer(name, buffer) for name, buffer in buffers.items()}
        self._last_run, self._events = LastRun(), Attached()
        self._planned: Plan | None = None
        self._zeros: torch.Tensor | None = None

    def _buffer(self, name: str, buffer: torch.Tensor | None) -> torch.Tensor:
        checked = check_vector(self._name, name, buffer, torch.int32)
        check_device(self._name, name, checked, self.device)
        return checked

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if tables are copied to the caller's buffers, for CUDA graphs."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces. Plan before the next run, and capture graphs again.

        Args:
            float_workspace_buffer: memory for partial states, on the wrapper's device.
            int_workspace_buffer: memory for plans, on the same device.

        Raises:
            ValueError: another device, or buffers that are not contiguous.
        """
        op, name = f"{self._name}.reset_workspace_buffer", "float_workspace_buffer"
        check_tensor(op, name, float_workspace_buffer)
        check_device(op, name, float_workspace_buffer, self.device)
        self._scheduler.reset(float_workspace_buffer, int_workspace_buffer)
        self._planned = None

    def _plan(
        self,
        names: tuple[str, str, str, str],
        qo_indptr: torch.Tensor | None,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_lens: torch.Tensor,
        num_heads: int,
        head_dims: tuple[int, int],
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype | str,
        kv_data_type: torch.dtype | str,
        last_page: bool = False,
        profiler: bool = False,
    ) -> None:
        """Make the plan.

        Args:
            names: the caller's names of the four tables.
            last_page: ``kv_lens`` are the lengths of last pages, and each request has one query.
        """
        op = self._scheduler.op
        dtype, kv_dtype, numbers = kind_of(
            op, self.device, *head_dims, last_page, num_heads, page_size, causal, sm_scale, q_data_type, kv_data_type,
            *self._default_rule,
        )  # fmt: skip
        queries = None if last_page else index_table(op, names[0], qo_indptr)
        indptr, indices = index_table(op, names[1], kv_indptr), index_table(op, names[2], kv_indices)
        given_lens = index_table(op, names[3], kv_lens)
        batch_size = given_lens.numel()
        if indptr.numel() > batch_size + 1:
            indptr = indptr[: batch_size + 1]  # callers pass longer tables, as to FlashInfer
        near_qo, near_kv, near_lens = on_host(queries, indptr, given_lens)
        buffers = [self._buffers.get(name) for name in names]
        check_batch_size(op, names[1], batch_size, buffers[1])
        profiler = profiler or self._events.attached is not None
        operators = operators_for(op, self.device, self._backend, profiler, (dtype, kv_dtype))
        lens = near_lens
        if last_page and near_kv.numel() == batch_size + 1:
            pages = near_kv.diff().long()
            lens = torch.where(pages > 0, (pages - 1) * page_size + near_lens, 0)
            lens = lens.masked_fill_((pages > 0) & (near_lens < 0) | (lens > INT32_MAX), -1).int()
        near = HostTables(near_qo, lens, near_kv, indices if indices.is_cpu else None)
        plan = partial(operators.plan, self._scheduler.float_workspace)
        host_plan = self._scheduler.make(plan, numbers, near, fixed=(num_heads, bool(causal)))
        if host_plan is None or indices.numel() < host_plan.ranges[-1]:
            _bad_tables(op, names, near_qo, near_kv, near_lens, indices, page_size, last_page)
        rows, _, num_pages, _, _ = host_plan.ranges
        self._last_run.wait(self.device, ())
        tables = Tables(op, self.device, non_blocking=True)
        if buffers[0] is not None and queries is not None:
            tables.to_device(names[0], buffers[0], queries)
        if buffers[3] is not None:
            tables.to_device(names[3], buffers[3], given_lens)
        taken_indptr, taken_indices = self._scheduler.key_tables(
            host_plan, tables, names[1:3], (indptr, indices), buffers[1:3]
        )
        assert taken_indices is not None
        lists = self._scheduler.write(host_plan)
        tables.commit()
        sizes = torch.tensor(lists[3:], dtype=torch.int64, device="cpu")
        self._planned = Plan(
            operators, taken_indptr, taken_indices, self._scheduler.int_workspace, sizes,
            num_heads, page_size, bool(causal), float(sm_scale), dtype, kv_dtype,
            torch.empty(rows, 0, device="cpu"), num_pages, None if head_dims[1] else self._no_rope(),
        )  # fmt: skip

    def _no_rope(self) -> torch.Tensor:
        """Return zeros that stay at their address, because graphs read them after later plans."""
        if self._zeros is None:
            self._zeros = torch.zeros(HEAD_DIM_KPE * 4, dtype=torch.uint8, device=self.device)  # of float32 at most
        return self._zeros

    def _run(
        self,
        planned: Plan | None,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        sm_scale: float = 1.0,
        o_scale: float = 1.0,
        profiler_buffer: torch.Tensor | None = None,
        scales: Scales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention.

        Args:
            sm_scale, o_scale: factors of the planned ``sm_scale`` and of the output.
            scales, sinks: checked by the caller.
        """
        op = f"{self._name}.run"
        if planned is None:
            raise RuntimeError(f"{op}: got a call before plan(), wanted plan() first")
        no_gradient(op, (q_nope, q_pe, ckv_cache, kpe_cache, scales.ckv_arr, sinks))
        self._check_run(op, planned, q_nope, q_pe, ckv_cache, kpe_cache)
        rows = q_nope.shape[:2]
        if planned.no_rope is None:
            q_nope, q_pe = as_kernel_input(q_nope), as_kernel_input(q_pe)
        else:
            check_metadata(op, "q_pe", q_pe, (*rows, 0), self.device, planned.dtype)
            check_metadata(op, "kpe_cache", kpe_cache, (*ckv_cache.shape[:2], 0), self.device, planned.kv_dtype)
            zeros = planned.no_rope
            q_nope, q_pe = as_kernel_input(q_nope), zeros.view(planned.dtype)[:HEAD_DIM_KPE].expand(*rows, -1)
            kpe_cache = zeros.view(planned.kv_dtype)[:HEAD_DIM_KPE].expand(*ckv_cache.shape[:2], -1)
        events = checked_buffer(
            op,
            self._events.buffer_of_run(profiler_buffer, planned.operators.profiler),
            planned.operators.profiler,
            self.device,
        )
        if out is None:
            out = torch.empty((*rows, HEAD_DIM_CKV), dtype=planned.dtype, device=q_nope.device)
        if lse is None and return_lse:
            lse = torch.empty(rows, dtype=torch.float32, device=q_nope.device)
        self._last_run.record(self.device)
        # A graph of torch.compile allocates its partial states. A workspace would be a mutated input.
        workspace = None if torch.compiler.is_compiling() else self._scheduler.float_workspace
        run = planned.operators.run
        if scales.ckv_arr is not None:
            run = run_for_scales(op, self.device, planned.operators)
        run(
            q_nope, q_pe, ckv_cache, kpe_cache, out, lse, planned.kv_indptr, planned.kv_indices, planned.lists,
            planned.sizes, workspace, planned.causal, planned.sm_scale * sm_scale * scales.ckv, o_scale * scales.ckv,
            scales.kpe_by_ckv, scales.ckv_arr, sinks, *events,
        )  # fmt: skip
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _check_run(
        self,
        op: str,
        planned: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
    ) -> None:
        """Check that the inputs match the plan. The operator checks the rest."""
        given = dict(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
        for name, x in given.items():
            check_dims(op, name, x, 3)
            if x.device != self.device:  # calls of checks for each tensor would take 1 us in each run
                check_device(op, name, x, self.device, " as the plan's tables are")
            dtype = planned.kv_dtype if name.endswith("cache") else planned.dtype
            if x.dtype != dtype:
                # FlashInfer raises ValueError, and names the attribute.
                raise value_error(op, f"{name}.dtype", x.dtype, f"{dtype}, for which plan() was called")
        rows = planned.rows.shape[0]
        if not (self._use_cuda_graph and exceeds(q_nope.shape[0], rows)):
            check_as_planned(op, "q_nope", q_nope.shape[0], rows, "queries")
        check_as_planned(op, "q_nope", q_nope.shape[1], planned.num_heads, "heads")
        check_as_planned(op, "ckv_cache", ckv_cache.shape[1], planned.page_size, "slots in a page")
        why = " for the tables of plan()"
        check_range(op, "ckv_cache", ckv_cache.shape[0], planned.pages, unit="pages", why=why)


@cached_by_value
def kind_of(
    op: str,
    device: torch.device,
    head_dim_ckv: int,
    head_dim_kpe: int,
    last_page: bool,
    num_heads: int,
    page_size: int,
    causal: bool,
    sm_scale: float,
    q_data_type: torch.dtype | str,
    kv_data_type: torch.dtype | str,
    split: bool,
    kv_chunk: int,
) -> tuple[torch.dtype, torch.dtype, PlanNumbers]:
    """Return the checked dtypes and numbers of a plan. All heads of a query read one head of keys.

    Raises:
        ValueError, TypeError: an argument that does not fit.
    """
    check_head_dims(head_dim_ckv, head_dim_kpe, f"{op}: ", "head_dim_compressed_kv" if last_page else "head_dim_ckv")
    dtype, kv_dtype = dtype_of(op, "q_data_type", q_data_type), dtype_of(op, "kv_data_type", kv_data_type)
    check_dtype(op, device, dtype, kv_dtype)
    for name, number in (("num_heads", num_heads), ("page_size", page_size)):
        positive(op, name, number)
    positive_real(op, "sm_scale", sm_scale, MOST_SCALE)
    mask_mode = int(bool(causal))
    tile_rows = 0 if split and kv_chunk == 0 else FIXED_TILE_ROWS
    numbers = PlanNumbers(
        num_heads, 1, head_dim_ckv, head_dim_ckv, 0, 0, 0, mask_mode=mask_mode, tile_rows=tile_rows, split=int(split),
        kv_chunk=kv_chunk, page_size=page_size,
    )  # fmt: skip
    return dtype, kv_dtype, numbers


def _bad_tables(
    op: str,
    names: tuple[str, str, str, str],
    qo_indptr: torch.Tensor | None,
    indptr: torch.Tensor,
    lens: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
    last_page: bool,
) -> NoReturn:
    """Raise the error of tables that do not fit each other; all but ``indices`` are on the host."""
    batch_size = lens.numel()
    check_count(op, names[1], indptr, batch_size + 1, f", one more than {names[3]} has")
    first, used = check_offsets(op, names[1], indptr)
    if qo_indptr is not None:
        check_offsets(op, names[0], qo_indptr, batch_size)
    pages = indptr.diff().long()
    full = ((pages - 1) * page_size).clamp(min=0) if last_page else torch.zeros_like(pages)
    lens = lens.where(pages > 0, 0) if last_page else lens
    check_each(op, names[3], lens, 0, pages * page_size - full, ", the slots of its pages")
    if batch_size:
        check_range(op, names[3], int((full + lens).max()), most=INT32_MAX, unit="keys of a request")
    check_indices(op, names[2], indices, names[1], first, used)
    raise ValueError(f"{op}: {names[1]}: got tables that do not fit each other")
