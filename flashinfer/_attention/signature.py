"""Arguments of attention's operators, by name, in the order of their schemas.

csrc/attention/arguments.h has the same lists, and modules register schemas from them. A test compares both. A
call names only the arguments that differ from their defaults. A new argument needs a line in each list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class CallArguments(NamedTuple):
    """Arguments of a call, without queries, keys, values, results and the variant's parameters.

    The defaults describe one request without a plan and without a custom mask.
    """

    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    plan: Tensor | None = None
    float_workspace: Tensor | None = None
    batch_size: int = 1
    max_items: int = 0
    max_merges: int = 0
    max_slots: int = 0
    tile_rows: int = 0
    slot_rows: int = 0
    custom_mask: Tensor | None = None
    mask_indptr: Tensor | None = None
    prefix_len: Tensor | None = None
    token_pos_in_items: Tensor | None = None
    token_pos_in_items_len: int = 0
    kv_layout: int = 0
    mask_mode: int = 0
    window_left: int = -1
    o_scale: float = 1.0
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    variant: int = 0


class Parameters(NamedTuple):
    """Parameters of the builtin variants. A custom variant replaces them.

    ``maybe_numbers``: see :func:`flashinfer._ops.scalars.numbers_of`. ``maybe_head_scales``: see :mod:`.scales`.
    ``maybe_sinks``: ``[num_qo_heads]`` float32, see ``sinks`` of the wrappers' ``run()``.
    """

    maybe_alibi_slopes: Tensor | None = None
    maybe_numbers: Tensor | None = None
    maybe_head_scales: Tensor | None = None
    maybe_sinks: Tensor | None = None
    sm_scale: float = 1.0
    logits_soft_cap: float = 0.0


class PlanNumbers(NamedTuple):
    """Numbers of a plan. The operator ``plan`` takes them as one tensor, see csrc/attention/tables.h.

    ``max_items``, ``max_merges`` and ``tile_rows`` are 0 unless a captured graph has fixed them.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype_q: int
    dtype_kv: int
    dtype_o: int
    mask_mode: int = 0
    window_left: int = -1
    device: int = 0
    max_items: int = 0
    max_merges: int = 0
    tile_rows: int = 0
    split: int = 1
    kv_chunk: int = 0  # keys are split at its multiples; 0: splits balance the work
    variant: int = 0
    page_size: int = 0  # 0: keys are ragged
    with_tables: int = 0  # 1: the plan also has kv_indptr and the used kv_indices, after its lists

    @property
    def fixed(self) -> tuple[int, ...]:
        """Return the numbers that all plans of one captured graph share."""
        return self[:7]

    def tensor(self) -> torch.Tensor:
        """Return the numbers as operators take them."""
        return torch.tensor(self, dtype=torch.int64, device="cpu")


class HostTables(NamedTuple):
    """Tables of a plan on the host. The operator ``plan`` takes them after the numbers.

    ``kv_lens`` has the number of keys of each request. Without it, they are computed from the other tables. Pages are
    checked if ``kv_indices`` is not ``None``.
    """

    qo_indptr: Tensor | None = None  # None: one query of each request
    kv_lens: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    last_page_len: Tensor | None = None


class RebindArguments(NamedTuple):
    """Arguments of ``rebind``. It replaces the plan of a handle's bound calls."""

    handle: int
    plan: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    batch_size: int
    max_items: int
    max_merges: int
    max_slots: int
    tile_rows: int
    slot_rows: int
    num_queries: int
    kv_size: int


class ExpectedArguments(NamedTuple):
    """Properties of bound calls, for ``bind``. -1 allows any value."""

    handle: int
    q_dims: int
    num_queries: int
    allows_more_queries: bool
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype_q: int
    dtype_kv: int
    page_size: int
    kv_size: int


_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "int": "int", "float": "float", "bool": "bool"}


def schema_of(arguments: type[Any], integers: str = "int") -> str:
    """Return the arguments in the form of torch's schemas: ``"Tensor? kv_indptr, int batch_size, ..."``.

    ``integers`` is ``"SymInt"`` for sizes that a graph treats as symbolic.
    """
    types = _TYPES | {"int": integers}
    # NamedTuple stores string annotations as forward references.
    annotations = {name: getattr(one, "__forward_arg__", one) for name, one in arguments.__annotations__.items()}
    return ", ".join(f"{types[str(one)]} {name}" for name, one in annotations.items())
