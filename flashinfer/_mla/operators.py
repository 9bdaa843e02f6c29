"""Operators of multi-head latent attention, and the selection of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from .._attention.kernels import capability
from .._ops.declare import define
from .._ops.numbers import check_option
from .._ops.route import without_gradient
from ..jit.machine.arch import Arch
from ..jit.module import JitSpec
from ..jit.modules._family import arch_kernels
from ..jit.modules.mla import (
    BACKENDS,
    FP8,
    check_backend,
    dtypes_value,
    mla_dtypes,
    mla_spec,
    mla_values,
    operators_of,
)
from ..jit.probe import probe


class Problem(NamedTuple):
    """Problem of a plan: the arguments of ``mla_plan`` after the buffer that it fills, except the last ones.

    ``max_items``, ``max_merges`` and ``tile_rows`` are 0 unless a captured graph has fixed them.
    """

    qo_indptr: torch.Tensor | None  # on the host; None: one query for each request
    kv_lens: torch.Tensor  # on the host
    num_heads: int
    causal: bool
    head_dim_ckv: int
    device: int = 0
    max_items: int = 0
    max_merges: int = 0
    tile_rows: int = 0
    split: bool = True

    @property
    def batch_size(self) -> int:
        return self.kv_lens.numel()

    @property
    def num_queries(self) -> int:
        return self.batch_size if self.qo_indptr is None else int(self.qo_indptr[-1])

    @property
    def fixed(self) -> tuple[int, ...]:
        """Return the numbers that all plans for one captured graph share."""
        return (self.num_heads, self.causal)

    def bytes_of(self, max_slots: int, slot_rows: int) -> int:
        """Return the bytes of partial states: the output's columns, m and l, each float32."""
        return max_slots * slot_rows * (self.head_dim_ckv + 2) * 4


class Operators(NamedTuple):
    """Plan and run of one set of kernels.

    ``run`` takes a buffer as its last argument if they write events.
    """

    plan: Callable[..., None]
    run: Callable[..., None]
    profiler: bool = False

    def fill(self, workspace: torch.Tensor, buffer: torch.Tensor, *fields: Any) -> None:
        """Make a plan, as :class:`flashinfer._attention.lists.Scheduler` asks for one, for ``workspace``'s device."""
        p = Problem(*fields)
        self.plan(
            workspace, buffer, p.qo_indptr, p.kv_lens, p.num_heads, p.causal, p.max_items, p.max_merges, p.tile_rows,
            p.split,
        )  # fmt: skip


def _value(dtype_q: torch.dtype, dtype_kv: torch.dtype) -> str:
    q, kv = (str(dtype).removeprefix("torch.") for dtype in (dtype_q, dtype_kv))
    return dtypes_value(q, kv)


def _define(kernels: str, profiler: bool = False) -> Operators:
    def module(backend: str) -> JitSpec:
        return mla_spec(kernels or backend, profiler=profiler)

    namespace = operators_of(kernels, profiler)

    plan = define(
        "mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor? qo_indptr, Tensor kv_lens, int num_heads, bool causal,"
        " int max_items, int max_merges, int tile_rows, bool split) -> ()",
        module,
        lambda *_: None,
        on_host=("buffer", "qo_indptr", "kv_lens"),
        needs=lambda *_: {},
        kernels=namespace,
    )
    run = define(
        "mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse,"
        " Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal,"
        f" float sm_scale, float o_scale{', Tensor(d!) profiler_buffer' if profiler else ''}) -> ()",
        module,
        lambda *_: None,
        general=without_gradient("mla_run", "q_nope", "q_pe", "ckv_cache", "kpe_cache"),
        on_host=("sizes",),
        needs=lambda spec, q_nope, q_pe, ckv_cache, *_: {"dtypes": (_value(q_nope.dtype, ckv_cache.dtype),)},
        kernels=namespace,
    )
    return Operators(plan, run, profiler)


_ARCHS = arch_kernels("mla")
_OPERATORS = {
    (kernels, profiler): _define(kernels, profiler) for kernels in ("", *_ARCHS) for profiler in (False, True)
}


@cache
def operators_for(
    op: str, device: torch.device, backend: str, profiler: bool = False, dtypes: tuple[torch.dtype, ...] = ()
) -> Operators:
    """Return the operators of a device's kernels: those for its arch, if available or required.

    Args:
        profiler: select kernels that write events.
        dtypes: dtypes of queries and of the cache, if they are known.

    Raises:
        ValueError: another backend, or one whose kernels support neither the device nor the dtypes.
    """
    check_backend(backend, f"{op}: ")
    named = BACKENDS[backend]
    for kernels in _ARCHS:
        if named not in ("", kernels):
            continue
        arch = Arch.of(kernels)
        runs = device.type == "cuda" and arch.runs_on(capability(device))
        if named and not runs:
            others = [one for one in BACKENDS if one != backend]
            needs = f" on {device}: {backend!r} needs compute capability {arch.major}.{arch.minor}"
            check_option(op, "backend", backend, others, needs)
        reads = not dtypes or _value(*dtypes) in mla_values(kernels, mla_dtypes(kernels))
        if named and not reads:
            check_option(op, "kv_data_type", dtypes[1], dtypes[:1], f" with backend {backend!r}")
        if runs and reads and (named or probe(mla_spec(kernels, profiler=profiler)).state != "impossible"):
            return _OPERATORS[kernels, profiler]
    return _OPERATORS["", profiler]


def check_dtype(op: str, device: torch.device, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
    """Check the dtypes. Caches have the queries' dtype or 8 bits."""
    known = mla_dtypes("cpu" if device.type == "cpu" else "cuda")
    check_option(op, "q_data_type", q_data_type, [getattr(torch, one) for one in known], f" on {device.type}")
    check_option(op, "kv_data_type", kv_data_type, (q_data_type, getattr(torch, FP8)))
