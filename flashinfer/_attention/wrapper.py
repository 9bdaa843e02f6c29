"""The base of the wrappers: a plan bound to an operator once, so that ``run()`` has little left to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from .._ops.scalars import numbers_of
from ..jit.module import JitSpec
from .arguments import (
    NO_SCALES,
    Logits,
    Operators,
    PagedCache,
    Scale,
    caches_of,
    call,
    check_dims,
    check_tensor,
    custom_operators,
    layout_of,
    no_gradient,
    own_operators,
    own_parameters,
    rows_of,
    scaled_query,
    value_scale,
)
from .bound import Bound, Result, bind_plan
from .kernels import Wanted, choose
from .masks import MaskTensors
from .schedule import Scheduler, Shape, check_indptr, check_table, paged_kv_lens, refuse_graph
from .traced import as_shape, differs, exceeds, from_shape


class Tables:
    """Tables of a plan on the device: fresh copies, or in buffers of the caller's, which ``commit()`` writes."""

    def __init__(self, op: str, device: torch.device, non_blocking: bool) -> None:
        self.op, self.device, self.non_blocking = op, device, non_blocking
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, name: str, buffer: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        if buffer is None:
            return x.to(self.device, non_blocking=self.non_blocking, copy=True)
        if buffer.numel() < x.numel():
            raise ValueError(
                f"{self.op}: {name}: got {x.numel()} elements, and the buffer given for it holds {buffer.numel()}"
            )
        self.pending.append((buffer[: x.numel()], x))
        return buffer

    def commit(self) -> None:
        for buffer, x in self.pending:
            buffer.copy_(x, non_blocking=self.non_blocking)


@dataclass(frozen=True)
class Batch:
    """The requests of a plan: lengths on the host, tables on the device."""

    rows: int  # queries of all requests
    qo_indptr: torch.Tensor | None  # on the host; None: one query for each request
    kv_lens: torch.Tensor  # on the host
    kv_rows: int  # pages that an index names (where they could be looked at), or rows of ragged keys
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor | None


@dataclass(frozen=True)
class Planned:
    """A plan, ready to run."""

    batch: Batch
    shape: Shape
    logits: Logits
    causal: int
    masks: MaskTensors
    operators: Operators
    head: tuple[Any, ...]  # the operator's arguments between lse and o_scale
    tail: tuple[Any, ...]  # those from o_scale on, without scales
    page_size: int | None
    sizes: torch.Tensor  # rows, kv_rows, what of head is a size, and window_left, for graphs


class BatchWrapper:
    """A batch of requests with one plan; see the public wrappers."""

    _family, _backend = "prefill", "auto"
    _paged_buffers: tuple[torch.Tensor | None, ...] = (None, None, None)

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        custom: Callable[[str], JitSpec] | None,
    ) -> None:
        self._name = type(self).__name__
        self._layout = layout_of(self._name, kv_layout)
        self._kv_layout = kv_layout
        self._use_cuda_graph = bool(use_cuda_graph)
        check_tensor(self._name, "float_workspace_buffer", float_workspace_buffer)
        self._scheduler = Scheduler(f"{self._name}.plan", float_workspace_buffer, self._use_cuda_graph)
        self.device = self._scheduler.device
        self._custom = None if custom is None else custom_operators(custom(self.device.type))
        self._planned: Planned | None = None
        self._seen: tuple[Any, ...] | None = None  # shapes and dtypes that fit the plan
        self._bound: Bound | None = None  # the plan as its module keeps it, for eager calls

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper's tables lie in buffers of the caller's, for CUDA graphs."""
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
        self._planned = self._bound = None

    def _graph_buffer(
        self, name: str, buffer: torch.Tensor | None, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor | None:
        """A buffer for a table, given to the constructor; without CUDA graphs tables have no buffers."""
        if not self._use_cuda_graph:
            return None
        check_table(self._name, name, buffer, dtype)
        assert buffer is not None
        if buffer.device != self.device:
            raise ValueError(f"{self._name}: {name}: got one on {buffer.device}, wanted {self.device}")
        return buffer

    def _paged_graph_buffers(self, **buffers: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The buffers of indptr, indices and last_page_len, by the constructor's names of them."""
        checked = tuple(self._graph_buffer(name, buffer) for name, buffer in buffers.items())
        (indptr_name, _, last_name), (indptr, _, last) = buffers, checked
        if indptr is not None and last is not None and last.numel() != indptr.numel() - 1:
            raise ValueError(
                f"{self._name}: {last_name}: got {last.numel()} elements, wanted {indptr.numel() - 1}, one less than"
                f" {indptr_name}"
            )
        return checked

    def _paged_batch(
        self,
        tables: Tables,
        qo_indptr: torch.Tensor | None,
        page_size: int,
        near: list[torch.Tensor],
        **given: torch.Tensor,
    ) -> Batch:
        """Tables of a paged batch, checked and on their way to the device.

        ``given``: indptr, indices and last_page_len of pages, by the caller's names of them; ``near``: the first and the
        last of these on the host, where ``qo_indptr`` is too.
        """
        (indptr_name, indptr), (indices_name, indices), (last_name, last) = given.items()
        near_indptr, near_last = near
        if page_size < 1:
            raise ValueError(f"{tables.op}: page_size: got {page_size}, wanted a positive number")
        indptr_buf, indices_buf, last_buf = self._paged_buffers
        check_indptr(tables.op, indptr_name, near_indptr)
        batch_size = self._check_batch_size(tables.op, indptr_name, near_indptr.numel() - 1, indptr_buf)
        if qo_indptr is not None and qo_indptr.numel() != batch_size + 1:
            got = qo_indptr.numel() - 1
            raise ValueError(f"{tables.op}: qo_indptr: got {got} requests, and {indptr_name} {batch_size}")
        if near_last.numel() != batch_size:
            raise ValueError(f"{tables.op}: {last_name}: got {near_last.numel()} elements, wanted {batch_size}")
        used = int(near_indptr[-1])
        if indices.numel() < used:
            raise ValueError(
                f"{tables.op}: {indices_name}: got {indices.numel()} pages, and {indptr_name} names {used}"
            )
        highest = -1
        if indices.device.type == "cpu" and used > 0:
            lowest, highest = (int(x) for x in indices[:used].aminmax())
            if lowest < 0:
                raise ValueError(f"{tables.op}: {indices_name}: got {lowest}, wanted numbers of pages")
        kv_lens = paged_kv_lens(tables.op, last_name, near_indptr, near_last, page_size)
        if last_buf is not None:
            tables.take(last_name, last_buf, last)
        return Batch(
            batch_size if qo_indptr is None else int(qo_indptr[-1]),
            qo_indptr,
            kv_lens,
            highest + 1,
            tables.take(indptr_name, indptr_buf, indptr),
            tables.take(indices_name, indices_buf, indices[:used]),
        )

    def _check_batch_size(self, op: str, name: str, batch_size: int, buffer: torch.Tensor | None) -> int:
        if buffer is not None and batch_size != buffer.numel() - 1:
            raise ValueError(
                f"{op}: {name}: got {batch_size} requests, and the buffer given for CUDA graphs is for {buffer.numel() - 1}"
            )
        return batch_size

    def end_forward(self) -> None:
        """Do nothing; kept for callers of older interfaces."""

    def _operators(
        self, batch: Batch, shape: Shape, logits: Logits, mask_mode: int, page_size: int | None
    ) -> Operators:
        if self._custom is None:
            dtypes, head_dims = (shape.dtype_q, shape.dtype_kv, shape.dtype_o), (shape.head_dim_qk, shape.head_dim_vo)
            soft_cap, group = logits.logits_soft_cap > 0, shape.num_qo_heads // shape.num_kv_heads
            wanted = Wanted(
                self._family, self.device, dtypes, head_dims, logits.pos_encoding_mode, soft_cap, mask_mode, group,
                page_size,
            )  # fmt: skip
            rows, bounds = batch.rows * group // max(batch.kv_lens.numel(), 1), self._scheduler.bounds
            kernels = choose(self._backend, wanted, rows)
            if bounds is not None and bounds.shape == shape and self._planned is not None:
                # What a graph was captured with serves the plans after the first, where it can.
                before = self._planned.operators.kernels
                if before != kernels and wanted.why_not_hopper() is None:
                    kernels = before
                elif before != kernels:
                    self._scheduler.bounds = None
            return own_operators(
                self._family, self.device.type, dtypes, head_dims, logits.pos_encoding_mode, soft_cap, kernels
            )
        if logits.pos_encoding_mode or logits.logits_soft_cap > 0:
            raise ValueError(
                f"{self._name}.plan: pos_encoding_mode, logits_soft_cap: got one with jit_args, wanted none: a variant"
                " of your own says itself what becomes of logits"
            )
        return self._custom

    def _plan(
        self, batch: Batch, shape: Shape, logits: Logits, causal: int, masks: MaskTensors, page_size: int | None,
        tables: Tables | None = None,
    ) -> None:  # fmt: skip
        """Make a plan and keep it; then, when nothing can fail any more, write the caller's buffers."""
        refuse_graph()
        mask_mode = causal if masks.mode is None else masks.mode
        operators = self._operators(batch, shape, logits, mask_mode, page_size)
        lists = self._scheduler.make(operators, shape, batch.qo_indptr, batch.kv_lens, mask_mode, logits.window_left)
        head = (
            batch.kv_indptr, batch.kv_indices, *lists, masks.packed, masks.indptr, masks.prefix_len,
            masks.token_pos_in_items, masks.token_pos_in_items_len, masks.max_item_len, self._layout, mask_mode,
            logits.window_left,
        )  # fmt: skip
        own = () if operators.custom else own_parameters(logits, shape.num_qo_heads, self.device)
        tail = (1.0, logits.rope_scale, logits.rope_theta, operators.variant, *own)
        rows, kv_rows, bounds = batch.rows, batch.kv_rows, self._scheduler.bounds
        if bounds is not None and self.device.type == "cuda":
            # One captured graph serves all plans: what it compares with is the same for all.
            rows, kv_rows = bounds.rows // (shape.num_qo_heads // shape.num_kv_heads), 0
        sizes = as_shape((
            rows, kv_rows, *lists[2:], masks.token_pos_in_items_len, max(logits.window_left, -1) + 1,
        ))  # fmt: skip
        bound = bind_plan(
            operators, shape, batch.rows, self._use_cuda_graph, page_size, batch.kv_rows, head + tail, logits.sm_scale
        )
        self._planned, self._seen = (
            Planned(batch, shape, logits, causal, masks, operators, head, tail, page_size, sizes), None
        )  # fmt: skip
        self._bound = bound
        if tables is not None:
            tables.commit()

    def _plan_again(self, logits: Logits, causal: int | None = None) -> None:
        """The requests of the last plan with other options, which stay: what the deprecated forward() does."""
        planned = self._planned_or_fail("forward")
        causal = planned.causal if causal is None else causal
        if (logits, causal) != (planned.logits, planned.causal):
            self._plan(planned.batch, planned.shape, logits, causal, planned.masks, planned.page_size)

    def _planned_or_fail(self, what: str) -> Planned:
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
    ) -> Result:
        if not is_compiling() and not args and (bound := self._bound) is not None:
            k, v = paged_kv_cache, None
            # To ask an instance takes a tensor longer than its type does.
            if type(k) is not torch.Tensor and isinstance(k, (tuple, list)) and len(k) == 2:
                k, v = k
            result = bound.call(q, k, v, scales, out, lse, return_lse)
            if result is not None:
                return result
        k, v = caches_of(f"{self._name}.run", paged_kv_cache)
        return self._run(q, k, v, args, scales, out, lse, return_lse)

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
    ) -> Result:
        planned = self._planned
        if planned is None:
            planned = self._planned_or_fail("run")
        no_gradient(self._name, (q, k, v, *args), ".run")
        if is_dynamo_compiling() and not planned.operators.custom:
            return self._run_traced(planned, q, k, v, args, scales, out, lse, return_lse)
        # Layer after layer brings the same shapes: what was found right once is not looked at again.
        seen = (q.shape, k.shape, v.shape, q.dtype, k.dtype) if isinstance(q, torch.Tensor) else None
        if seen is None or seen != self._seen:
            self._check_run(planned, q, k, v, planned.batch.rows, planned.batch.kv_rows)
            self._seen = seen
        if not q.is_contiguous() or q.is_cuda:
            q = rows_of(q)
        tail, finish = planned.tail, None
        if args or planned.operators.custom or scales != NO_SCALES:
            q, tail, finish = self._scaled(planned, q, args, scales)
        out, lse = self._results(planned.shape, q, out, lse, return_lse)
        call(self._name, planned.operators.run, q, k, v, out, lse, *planned.head, *tail)
        if finish is not None:
            finish(out)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _run_traced(
        self,
        planned: Planned,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        args: tuple[Any, ...],
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_run` under ``torch.compile``: one graph for all plans."""
        if args:
            raise TypeError(f"{self._name}.run: got {len(args)} more arguments, wanted none without jit_args")
        sizes = from_shape(planned.sizes)
        self._check_run(planned, q, k, v, sizes[0], sizes[1])
        shape, logits = planned.shape, planned.logits
        out, lse = self._results(shape, q, out, lse, return_lse)
        q, factor = scaled_query(self._name, rows_of(q), shape.num_kv_heads, scales[0], scales[1])
        o_scale, finish = value_scale(self._name, scales[2], shape.num_qo_heads, shape.num_kv_heads, q.device)
        numbers = numbers_of(logits[2:], factor, q.device)
        slopes = planned.tail[4]
        cap, scale, rope_scale, rope_theta = logits[2:]
        tail: tuple[Any, ...]
        if numbers is None:
            tail = (o_scale, rope_scale, rope_theta, planned.operators.variant, slopes, None, scale * factor, cap)
        else:
            tail = (o_scale, 1.0, 1.0, planned.operators.variant, slopes, numbers, 1.0, 1.0)
        masks = planned.masks
        torch.ops.flashinfer.attend_planned(
            planned.operators.module, f"{self._name}.run", q, k, v, out, lse, *planned.head[:3], *sizes[:8],
            masks.packed, masks.indptr, masks.prefix_len, masks.token_pos_in_items, sizes[8], masks.max_item_len,
            self._layout, planned.causal if masks.mode is None else masks.mode, sizes[9] - 1, *tail,
        )  # fmt: skip
        if finish is not None:
            finish(out)
        return (out, lse) if return_lse else out  # type: ignore[return-value]

    def _results(
        self, shape: Shape, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The caller's tensors, checked, or new ones."""
        rows = (q.shape[0], shape.num_qo_heads)
        if out is None:
            out = torch.empty((*rows, shape.head_dim_vo), dtype=shape.dtype_o, device=q.device)
        else:
            self._check_result("out", out, (*rows, shape.head_dim_vo), shape.dtype_o)
        if lse is not None:
            self._check_result("lse", lse, rows, torch.float32)
        elif return_lse:
            lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        return out, lse

    def _scaled(
        self, planned: Planned, q: torch.Tensor, args: tuple[Any, ...], scales: tuple[Scale, Scale, Scale]
    ) -> tuple[torch.Tensor, tuple[Any, ...], Callable[[torch.Tensor], None] | None]:
        """The query, the operator's arguments from o_scale on, and what is left to do to the output."""
        shape, logits, operators = planned.shape, planned.logits, planned.operators
        if operators.custom and (scales[0] is not None or scales[1] is not None):
            raise ValueError(
                f"{self._name}.run: q_scale, k_scale: got one with jit_args, wanted none: a variant of your own has the"
                " scale of its logits as a parameter"
            )
        if args and not operators.custom:
            raise TypeError(f"{self._name}.run: got {len(args)} more arguments, wanted none without jit_args")
        q, factor = scaled_query(self._name, q, shape.num_kv_heads, scales[0], scales[1])
        o_scale, finish = value_scale(self._name, scales[2], shape.num_qo_heads, shape.num_kv_heads, q.device)
        parameters = args if operators.custom else own_parameters(logits, shape.num_qo_heads, self.device, factor)
        return q, (o_scale, logits.rope_scale, logits.rope_theta, operators.variant, *parameters), finish

    def _check_run(
        self, planned: Planned, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, kv_rows: int
    ) -> None:
        """What is run is what was planned."""
        op, shape = f"{self._name}.run", planned.shape
        check_dims(op, "q", q, 3)
        if differs(q.shape[0], rows) and not (self._use_cuda_graph and exceeds(q.shape[0], rows)):
            raise ValueError(f"{op}: q: got {q.shape[0]} queries, and plan() was called for {rows}")
        if q.shape[1] != shape.num_qo_heads or q.shape[2] != shape.head_dim_qk:
            wanted = f"[{rows}, {shape.num_qo_heads}, {shape.head_dim_qk}]"
            raise ValueError(f"{op}: q: got shape {list(q.shape)}, and plan() was called for {wanted}")
        ragged = planned.page_size is None
        heads, tokens = k.dim() - 2 - self._layout, k.dim() - 3 + self._layout
        if k.shape[heads] != shape.num_kv_heads or k.shape[-1] != shape.head_dim_qk or v.shape[-1] != shape.head_dim_vo:
            raise ValueError(
                f"{op}: k, v: got {k.shape[heads]} heads and head_dim {k.shape[-1]} (keys), {v.shape[-1]} (values), and"
                f" plan() was called for {shape.num_kv_heads}, {shape.head_dim_qk} and {shape.head_dim_vo}"
            )
        if q.dtype != shape.dtype_q or k.dtype != shape.dtype_kv:
            raise TypeError(
                f"{op}: q, k: got {q.dtype} and {k.dtype}, and plan() was called for {shape.dtype_q} and {shape.dtype_kv}"
            )
        if not ragged and k.shape[tokens] != planned.page_size:
            raise ValueError(
                f"{op}: paged_kv_cache: got pages of {k.shape[tokens]}, and plan() was called for {planned.page_size}"
            )
        if exceeds(kv_rows, k.shape[tokens] if ragged else k.shape[0]):
            got, what = (k.shape[tokens], "rows of keys") if ragged else (k.shape[0], "pages")
            raise ValueError(f"{op}: k: got {got} {what}, and the tables of plan() name {kv_rows}")

    def _check_result(self, name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        check_tensor(f"{self._name}.run", name, x)
        if x.shape != shape:
            raise ValueError(f"{self._name}.run: {name}: got shape {list(x.shape)}, wanted {list(shape)}")
        if x.dtype != dtype:
            raise TypeError(f"{self._name}.run: {name}: got {x.dtype}, wanted {dtype}")
