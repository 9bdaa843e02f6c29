"""Operators of multi-head latent attention, and the selection of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from .._attention.kernels import capability
from .._ops.declare import define
from .._ops.errors import called, value_error
from .._ops.numbers import check_option
from .._ops.route import without_gradient
from ..errors import UnsupportedError
from ..jit.machine.arch import Arch
from ..jit.module import JitSpec
from ..jit.modules._family import arch_kernels
from ..jit.modules.mla import (
    BACKENDS,
    FP8,
    SCALED,
    check_backend,
    dtypes_value,
    mla_dtypes,
    mla_spec,
    mla_values,
    operators_of,
)
from ..jit.probe import probe


class Operators(NamedTuple):
    """Plan and run of one set of kernels.

    ``run`` takes a buffer as its last argument if they write events.
    """

    plan: Callable[..., None]
    run: Callable[..., None]
    profiler: bool = False


def _value(dtype_q: torch.dtype, dtype_kv: torch.dtype) -> str:
    q, kv = (str(dtype).removeprefix("torch.") for dtype in (dtype_q, dtype_kv))
    return dtypes_value(q, kv)


def _define(kernels: str, profiler: bool = False) -> Operators:
    def module(backend: str) -> JitSpec:
        if kernels == SCALED:
            return mla_spec("cuda", scaled=True)
        return mla_spec(kernels or backend, profiler=profiler)

    namespace = operators_of(kernels, profiler)

    plan = define(
        "mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens,"
        " Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        module,
        on_host=("buffer", "numbers", "qo_indptr", "kv_lens", "kv_indptr", "kv_indices", "last_page_len"),
        needs=lambda *_: {},
        kernels=namespace,
    )
    run = define(
        "mla_run(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor(a!) out, Tensor(b!)? lse,"
        " Tensor kv_indptr, Tensor kv_indices, Tensor plan, Tensor sizes, Tensor(c!)? float_workspace, bool causal,"
        " float sm_scale, float o_scale, float pe_factor, Tensor? ckv_scales, Tensor? sinks"
        f"{', Tensor(d!) profiler_buffer' if profiler else ''}) -> ()",
        module,
        fallback=without_gradient("mla_run", "q_nope", "q_pe", "ckv_cache", "kpe_cache", "ckv_scales", "sinks"),
        on_host=("sizes",),
        needs=lambda spec, q_nope, q_pe, ckv_cache, *_: {"dtypes": (_value(q_nope.dtype, ckv_cache.dtype),)},
        kernels=namespace,
    )
    return Operators(plan, run, profiler)


_ARCHS = arch_kernels("mla")
_OPERATORS = {
    (kernels, profiler): _define(kernels, profiler) for kernels in ("", *_ARCHS) for profiler in (False, True)
}
_SCALED = _define(SCALED)


def run_for_scales(op: str, device: torch.device, operators: Operators) -> Callable[..., None]:
    """Return the run that multiplies latents by scales per token, after a plan of ``operators``.

    Raises:
        UnsupportedError: kernels that write events, on a GPU.
    """
    if device.type == "cpu":
        return operators.run
    if operators.profiler:
        raise UnsupportedError(f"{called(op)}: ckv_scale_arr: got a tensor, and no kernels for it write events")
    return _SCALED.run


@cache
def operators_for(
    op: str, device: torch.device, backend: str, profiler: bool = False, dtypes: tuple[torch.dtype, ...] = ()
) -> Operators:
    """Return the operators of a device's kernels: those for its arch, if available or required.

    Args:
        profiler: select kernels that write events.
        dtypes: dtypes of queries and of the cache, if they are known.

    Kernels of an arch do not read caches of 8 bits. The portable ones do, and serve its backend as well. As in
    FlashInfer, queries are bfloat16 then.

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
        if named and not reads and dtypes[0] != torch.bfloat16:
            wanted = f"q_data_type=torch.bfloat16 for a cache of 8 bits with backend {backend!r}"
            raise value_error(op, "q_data_type", dtypes[0], wanted)
        if runs and reads and (named or probe(mla_spec(kernels, profiler=profiler)).state != "impossible"):
            return _OPERATORS[kernels, profiler]
    return _OPERATORS["", profiler]


def check_dtype(op: str, device: torch.device, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
    """Check the dtypes. Caches have the queries' dtype or 8 bits."""
    known = mla_dtypes("cpu" if device.type == "cpu" else "cuda")
    check_option(op, "q_data_type", q_data_type, [getattr(torch, one) for one in known], f" on {device.type}")
    check_option(op, "kv_data_type", kv_data_type, (q_data_type, getattr(torch, FP8)))
