"""Checks of arguments that newer releases of FlashInfer added after 0.2.7.

The default of each argument has no effect. Any other value takes effect, or raises an error with the reason.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from .._compat.refused import FP4, TRTLLM_GEN, Reason
from .._ops.arguments import check_as_planned, check_items
from .._ops.numbers import check_option, positive, whole
from .._ops.tensors import check_count, check_tensor
from ..env import BATCH_INVARIANT
from ..errors import UnsupportedError
from .plan import BALANCED, SplitRule
from .tables import INT32_MAX

_BLOCK_TABLES = Reason("kernels that read block tables", "pass pages as indptr and indices")


INVARIANT_KEYS = 2048  # of a split of decode in batch-invariant mode


def split_rule_of(
    op: str, fixed_split_size: int | None, disable_split_kv: bool | None, page_size: int, default: SplitRule = BALANCED
) -> SplitRule:
    """Return the rule for ``fixed_split_size`` (in pages) and ``disable_split_kv``, or ``default`` without either.

    ``disable_split_kv`` has priority.
    """
    size = -1 if fixed_split_size is None else whole(op, "fixed_split_size", fixed_split_size)
    if size != -1:
        positive(op, "fixed_split_size", size)
    if disable_split_kv:
        return SplitRule(split=False)
    return SplitRule(kv_chunk=min(size * page_size, INT32_MAX)) if size > 0 else default


def default_rule(few_queries: bool) -> SplitRule:
    """Return the rule of a plan without an option.

    In batch-invariant mode, keys are split at fixed multiples if a request has few queries, and never otherwise. The
    partial states of many queries, and the lists of captured graphs, would take too much memory.
    """
    if not BATCH_INVARIANT.get():
        return BALANCED
    return SplitRule(kv_chunk=INVARIANT_KEYS) if few_queries else SplitRule(split=False)


def check_hints(op: str, batch_size: int, seq_lens: object, block_tables: object, **hints: object) -> None:
    """Check arguments of ``plan()`` that repeat information of its tables, or that no kernel here needs."""
    if seq_lens is not None:
        check_tensor(op, "seq_lens", seq_lens)
        check_count(op, "seq_lens", cast(torch.Tensor, seq_lens), batch_size, ", one for each request")
    _refuse(op, "block_tables", block_tables, _BLOCK_TABLES)
    for name, hint in hints.items():
        if hint is not None:
            whole(op, name, hint, 0)


def check_run(op: str, planned_window: int, window_left: int | None, kv_cache_sf: Any = None) -> None:
    """Check arguments of ``run()`` that must equal those of the plan, or that no kernel here supports."""
    if window_left is not None:
        check_as_planned(op, "window_left", max(whole(op, "window_left", window_left), -1), max(planned_window, -1))
    _refuse(op, "kv_cache_sf", kv_cache_sf, FP4)


def check_queries(op: str, q_len_per_req: int, use_tensor_cores: bool, backend: str, is_custom: bool) -> None:
    """Check that a wrapper of decode can plan several queries of each request."""
    if positive(op, "q_len_per_req", q_len_per_req) == 1:
        return
    got = f"{op}: q_len_per_req: got {q_len_per_req}"
    if not use_tensor_cores:
        raise ValueError(f"{got}, wanted 1 without use_tensor_cores=True of the constructor")
    if backend == "fa3":
        raise UnsupportedError(f"{got} with backend 'fa3', wanted backend 'fa2' or 'auto'")
    if is_custom:
        raise UnsupportedError(f"{got} with jit_args, wanted 1: a variant of decode has one query of each request")


def check_kv_lens(op: str, q_len_per_req: int, kv_lens: torch.Tensor) -> None:
    """Check that each request has at least as many keys as queries. ``kv_lens`` are on the host."""
    if kv_lens.numel() and (fewest := int(kv_lens.min())) < q_len_per_req:
        raise ValueError(
            f"{op}: q_len_per_req: got {q_len_per_req} and a request of {fewest} keys, wanted at least as many keys:"
            " a query would have an empty KV range"
        )


def check_backend(op: str, backend: str, known: tuple[str, ...], jit_args: object) -> None:
    """Check ``backend`` and ``jit_args`` of a constructor.

    Names of other libraries' backends raise ``UnsupportedError``. ``jit_args`` is checked too, because a caller may
    pass the backend in its position.
    """
    if jit_args is not None:
        check_items(op, "jit_args", jit_args, "a generator's arguments")
    if backend in ("trtllm-gen", "cudnn", "cute-dsl"):
        raise UnsupportedError(f"{op}: backend: got {backend!r}, which {TRTLLM_GEN}")
    check_option(op, "backend", backend, known)


def _refuse(op: str, name: str, value: object, reason: Reason) -> None:
    if value is not None:
        raise UnsupportedError(f"{op}: {name}: got {type(value).__name__}, wanted None: it {reason}")
