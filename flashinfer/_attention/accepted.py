"""Arguments of newer interfaces than 0.2.7's that engines pass: obeyed, or refused where they ask for what is not here.

Each has the value that an engine passes when it asks for nothing; that one is always taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _unsupported
from .._ops.numbers import whole
from ..errors import UnsupportedError
from .tables import INT32_MAX

_BLOCK_TABLES = _unsupported.Reason("kernels that read block tables", "pass pages as indptr and indices")


class Cut(NamedTuple):
    """How a plan may cut keys into pieces, whose results are merged."""

    split: bool = True
    kv_chunk: int = 0  # pieces end at multiples of so many keys; 0: they are as long as balances the work

    @property
    def is_fixed(self) -> bool:
        """Whether a request's result must not depend on the others: kernels and tiles are then the same for all."""
        return not self.split or self.kv_chunk > 0


BALANCED = Cut()


def cut_of(op: str, fixed_split_size: int | None, disable_split_kv: bool | None, page_size: int) -> Cut:
    """What ``fixed_split_size``, in pages, and ``disable_split_kv`` ask for; the latter goes before."""
    size = -1 if fixed_split_size is None else whole(op, "fixed_split_size", fixed_split_size)
    if size != -1 and size < 1:
        raise ValueError(f"{op}: fixed_split_size: got {size}, wanted a positive number of pages, -1 or None")
    if disable_split_kv:
        return Cut(split=False)
    return Cut(kv_chunk=min(size * page_size, INT32_MAX) if size > 0 else 0)


def check_hints(op: str, batch_size: int, seq_lens: object, block_tables: object, **hints: object) -> None:
    """Arguments of ``plan()`` that say again what its tables say, or that other libraries' kernels need."""
    if seq_lens is not None:
        if not isinstance(seq_lens, torch.Tensor):
            raise TypeError(f"{op}: seq_lens: got {type(seq_lens).__name__}, wanted Tensor or None")
        if seq_lens.numel() != batch_size:
            raise ValueError(f"{op}: seq_lens: got {seq_lens.numel()} elements, wanted {batch_size}, one each request")
    _refuse(op, "block_tables", block_tables, _BLOCK_TABLES)
    for name, hint in hints.items():
        if hint is not None and whole(op, name, hint) < 0:
            raise ValueError(f"{op}: {name}: got {hint}, wanted a number from 0 or None")


def check_run(
    op: str, planned_window: int, window_left: int | None, q_len_per_req: int | None = None, kv_cache_sf: Any = None
) -> None:
    """Arguments of ``run()`` that must be those of the plan, or ask for kernels that are not here."""
    if window_left is not None and max(whole(op, "window_left", window_left), -1) != max(planned_window, -1):
        raise ValueError(f"{op}: window_left: got {window_left}, and plan() was called for {planned_window}")
    check_one_query(op, q_len_per_req)
    _refuse(op, "kv_cache_sf", kv_cache_sf, _unsupported.FP4)


def check_one_query(op: str, q_len_per_req: int | None) -> None:
    """Check that decode is asked for one query of each request."""
    if q_len_per_req is not None and whole(op, "q_len_per_req", q_len_per_req) != 1:
        raise UnsupportedError(
            f"{op}: q_len_per_req: got {q_len_per_req}, wanted 1: use BatchPrefillWithPagedKVCacheWrapper"
        )


def check_backend(op: str, backend: str, known: tuple[str, ...], jit_args: object) -> None:
    """``backend`` of a constructor; those of other libraries' kernels are named so that the error can say so.

    ``jit_args`` beside it: what stands there by mistake is mostly a backend.
    """
    if jit_args is not None and not isinstance(jit_args, tuple | list):
        raise TypeError(f"{op}: jit_args: got {type(jit_args).__name__}, wanted a tuple of a generator's arguments")
    if backend in ("trtllm-gen", "cudnn", "cute-dsl"):
        raise UnsupportedError(f"{op}: backend: got {backend!r}, which {_unsupported.TRTLLM_GEN}")
    if backend not in known:
        raise ValueError(f"{op}: backend: got {backend!r}, wanted one of {', '.join(known)}")


def _refuse(op: str, name: str, value: object, reason: _unsupported.Reason) -> None:
    if value is not None:
        raise UnsupportedError(f"{op}: {name}: got {type(value).__name__}, wanted None: it {reason}")
