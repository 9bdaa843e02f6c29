"""Operators of multi-head latent attention, and the selection of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from .._attention.kernels import capability
from .._attention.signature import Problem
from .._ops.declare import define
from .._ops.route import without_gradient
from ..jit.module import JitSpec
from ..jit.modules.mla import (
    FP8,
    HOPPER,
    check_backend,
    dtypes_value,
    mla_dtypes,
    mla_spec,
    mla_values,
    profiled_namespace,
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
        return mla_spec(kernels or backend, profiler=profiler)

    namespace = profiled_namespace(kernels) if profiler else kernels

    plan = define(
        "mla_plan(Tensor workspace, Tensor(a!) buffer, Tensor numbers, Tensor? qo_indptr, Tensor? kv_lens,"
        " Tensor? kv_indptr, Tensor? kv_indices, Tensor? last_page_len) -> ()",
        module,
        lambda *_: None,
        on_host=("buffer", "numbers", "qo_indptr", "kv_lens", "kv_indptr", "kv_indices", "last_page_len"),
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


_PORTABLE, _HOPPER = ({profiler: _define(kernels, profiler) for profiler in (False, True)} for kernels in ("", HOPPER))


def problem_of(num_heads: int, head_dim_ckv: int, causal: bool, page_size: int) -> Problem:
    """Return the numbers of a plan: all heads of a query read one head of keys."""
    return Problem(num_heads, 1, head_dim_ckv, head_dim_ckv, 0, 0, 0, mask_mode=int(causal), page_size=page_size)


@cache
def operators_for(
    op: str, device: torch.device, backend: str, profiler: bool = False, dtypes: tuple[torch.dtype, ...] = ()
) -> Operators:
    """Return the operators of a device's kernels. On Hopper these are its own, if available or required.

    Args:
        profiler: select kernels that write events.
        dtypes: dtypes of queries and of the cache, if they are known.

    Raises:
        ValueError: another backend, or ``"fa3"`` on another device or with a cache of 8 bits.
    """
    check_backend(backend, f"{op}: ")
    is_hopper = device.type == "cuda" and capability(device) == (9, 0)
    if backend == "fa3" and not is_hopper:
        raise ValueError(f"{op}: backend: got 'fa3' for {device}, wanted a GPU of compute capability 9.0")
    for_hopper = not dtypes or _value(*dtypes) in mla_values(HOPPER, mla_dtypes(HOPPER))
    if backend == "fa3" and not for_hopper:
        raise ValueError(
            f"{op}: kv_data_type: got {dtypes[1]} for backend 'fa3', wanted {dtypes[0]}, or 'auto' or 'fa2'"
        )
    if backend == "fa2" or not is_hopper or not for_hopper:
        return _PORTABLE[profiler]
    hopper = backend == "fa3" or probe(mla_spec(HOPPER, profiler=profiler)).state != "impossible"
    return (_HOPPER if hopper else _PORTABLE)[profiler]


def check_dtype(op: str, device: torch.device, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
    """Check the dtypes. Caches have the queries' dtype or 8 bits."""
    known = mla_dtypes("cpu" if device.type == "cpu" else "cuda")
    if str(q_data_type).removeprefix("torch.") not in known:
        raise ValueError(f"{op}: q_data_type: got {q_data_type}, wanted one of {', '.join(known)} on {device.type}")
    if kv_data_type not in (q_data_type, getattr(torch, FP8)):
        raise ValueError(
            f"{op}: kv_data_type: got {kv_data_type}, wanted {q_data_type} as q_data_type is, or torch.{FP8}"
        )
