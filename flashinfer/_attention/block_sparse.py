"""Base of the wrappers of block-sparse attention. Each row of blocks is a request, whose pages are its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ops.arguments import check_equal
from .._ops.numbers import check_option, check_range
from .._ops.shapes import check_tensors
from .._ops.tensors import check_dims
from ..jit.frozen import refuse_capture
from ..jit.modules.prefill import check_kernels
from .arguments import CAUSAL, NON_CAUSAL, logits_of
from .lists import Shape
from .masks import NO_MASKS, MaskRequest, masks_of
from .tables import Batch, Tables
from .wrapper import BatchWrapper


def check_no_positions(op: str, pos_encoding_mode: str) -> None:
    why = ": kernels do not know the positions of keys in the matrix"
    check_option(op, "pos_encoding_mode", pos_encoding_mode, ("NONE",), why)


def causal_mask(
    qo_lens: Sequence[int], last_keys: Sequence[int], positions: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the masks of rows of blocks in a causal matrix, or ``None`` if they equal the kernels' causal mask.

    The kernels' causal mask is aligned at the end: the last query sees all keys.

    Args:
        qo_lens: number of queries of each row.
        last_keys: last key position that the first query of each row sees.
        positions: positions of each row's keys.
    """
    same, masks = True, []
    for qo_len, last_key, position in zip(qo_lens, last_keys, positions, strict=True):
        query = torch.arange(qo_len, device="cpu")[:, None]
        seen = position[None, :] <= last_key + query
        key = torch.arange(position.numel(), device="cpu")[None, :]
        aligned = key <= position.numel() - qo_len + query
        same = same and torch.equal(seen, aligned)
        masks.append(seen.flatten())
    return None if same else torch.cat(masks)


def sizes_on_host(op: str, num_kv_heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Check the map of blocks and the sizes of their rows and columns, and return them on the host."""
    refuse_capture("plan(): the host would read and write tables", "call it")
    names, ranks = ("block_mask_map", "block_row_sz", "block_col_sz"), (3, 2, 2)
    on_host = []
    for name, x, rank in zip(names, tensors, ranks, strict=True):
        check_dims(op, name, x, rank)
        if x.is_floating_point() or x.is_complex():
            raise TypeError(f"{op}: {name}: got {x.dtype}, wanted {'torch.bool' if rank == 3 else 'integers'}")
        on_host.append(x.to("cpu", torch.bool if rank == 3 else torch.int64))
    _, rows, columns = on_host[0].shape
    shapes = ((num_kv_heads, rows, columns), (num_kv_heads, rows), (num_kv_heads, columns))
    check_tensors(op, **{name: (x, shape) for name, x, shape in zip(names, on_host, shapes, strict=True)})
    for name, x in zip(names[1:], on_host[1:], strict=True):
        if x.numel():
            check_range(op, name, int(x.min()), 0)
        check_equal(op, name, x.sum(1).tolist(), "by head")
    return on_host


class BlockSparse(BatchWrapper):
    """Base of the wrappers of block-sparse attention."""

    _family, _cache_argument = "prefill", ""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        check_kernels(backend, f"{type(self).__name__}: ")
        self._backend = backend
        super().__init__(float_workspace_buffer, "NHD", False)

    def _plan_rows(
        self,
        tables: Tables,
        batch: Batch,
        shape: Shape,
        page_size: int,
        custom_mask: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
        causal: bool,
        options: tuple[float | None, float | None, float | None, float | None],
    ) -> None:
        """Make the plan. ``options`` are logits_soft_cap, sm_scale, rope_scale and rope_theta."""
        logits = logits_of(tables.op, shape.head_dim_qk, "NONE", -1, *options)
        masks = NO_MASKS
        if custom_mask is not None or packed_mask is not None:
            masks = masks_of(tables, batch, MaskRequest(custom_mask, packed_mask), None, False)
        self._plan(batch, shape, logits, CAUSAL if causal else NON_CAUSAL, masks, page_size)

    def _options(
        self,
        pos_encoding_mode: str,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        rope_scale: float | None,
        rope_theta: float | None,
    ) -> None:
        """Replace the options of ``plan()`` by those of ``forward()``."""
        check_no_positions(f"{self._name}.forward", pos_encoding_mode)
        self._use_options("NONE", -1, logits_soft_cap, sm_scale, rope_scale, rope_theta)
