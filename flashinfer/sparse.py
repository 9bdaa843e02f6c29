"""Block-sparse attention: keys outside the blocks of a query are neither read nor computed.

A row of blocks is a request of a batch. Its keys are those of its blocks, which are pages of ``k`` and ``v``.
Output and lse equal those of dense attention with a mask outside the blocks.
"""

from __future__ import annotations

import math
from functools import partialmethod

import torch
from torch.compiler import is_dynamo_compiling

from ._attention.block_sparse import BlockSparse, causal_mask, check_no_positions, sizes_on_host
from ._attention.lists import Shape
from ._attention.scales import Scale
from ._attention.tables import Tables, on_host, paged_batch
from ._ops.arguments import check_as_planned
from ._ops.indices import check_offsets, index_table, index_tables
from ._ops.numbers import check_multiple, check_range, whole
from ._ops.shapes import check_tensors
from ._ops.tensors import check_dims, check_tensor

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Convert masks of blocks to masks of rows of blocks, whose bits are ``packed_mask``.

    Args:
        mask: ``[nnz, R, C]``, the mask of each block, of any dtype.
        indptr: ``[MB + 1]`` int32 or int64, the first block of each row. It may be a slice of a longer table.
            Blocks before its first offset are skipped.

    Returns:
        ``[(nnz - indptr[0]) * R * C]``: for every row of blocks its mask ``[R, keys of the row's blocks]``.

    Raises:
        ValueError, TypeError: arguments of another shape, or offsets that decrease or do not end at ``nnz``.
    """
    op = "convert_bsr_mask_layout"
    nnz, rows, columns = check_tensors(op, mask=(mask, "nnz r c"))
    indptr = index_table(op, "indptr", indptr, torch.int64)  # often on the host, where mask is not
    if not is_dynamo_compiling():  # a graph cannot check values
        near = indptr.to("cpu", torch.int64)
        check_offsets(op, "indptr", near)
        check_range(op, "indptr", int(near[-1]), nnz, nnz, "blocks in all", " as mask has")
        if near[0] > 0:
            return convert_bsr_mask_layout(mask[int(near[0]) :], near - near[0])
    # Row r of a block starts after the earlier rows of blocks, r rows of all blocks of its own, and the
    # blocks before it.
    table, block = indptr.to(mask.device, torch.int64), torch.arange(nnz, device=mask.device)
    after = torch.searchsorted(table, block, right=True)
    first = table[after - 1]
    width = table[after] - first
    row = torch.arange(rows, device=mask.device)
    start = (first * rows)[:, None] + row * width[:, None] + (block - first)[:, None]
    order = torch.empty(nnz * rows, dtype=torch.int64, device=mask.device)
    order[start.flatten()] = torch.arange(nnz * rows, device=mask.device)
    return mask.reshape(nnz * rows, columns)[order].flatten()


class BlockSparseAttentionWrapper(BlockSparse):
    """Attention with a mask in block compressed rows (BSR): blocks of ``R`` queries and ``C`` keys.

    Call ``plan()`` once for each mask, then ``run()`` for each layer.

    Args:
        float_workspace_buffer: as for :class:`flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
        backend: ``"auto"``, ``"fa2"`` or ``"fa3"``, as for the wrappers of prefill. Pages are columns of
            blocks.

    Raises:
        ValueError, TypeError: a buffer or a backend that does not fit.
    """

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
    ) -> None:
        """Balance the work of a mask.

        Args:
            indptr: ``[ceil(M / R) + 1]`` integers, the first block of each row in ``indices``. It may be a
                slice of a longer table, together with the whole ``indices`` and ``mask``.
            indices: ``[nnz]`` integers, the column of each block, below ``N / C``.
            M, N: numbers of queries and keys.
            R, C: queries and keys of a block. ``C`` divides ``N``. The last row of blocks may have fewer
                queries than ``R``.
            num_qo_heads, num_kv_heads, head_dim: sizes of the runs.
            mask: ``[nnz, R, C]`` bool, the visible elements of each block, by default all.
            packed_mask: the bits of ``mask`` by rows of blocks:
                ``segment_packbits(convert_bsr_mask_layout(mask, indptr), indptr * R * C,
                bitorder="little")[0]``. It has priority over ``mask``, and both have priority over
                ``causal``.
            causal: query ``i`` sees the keys up to ``i + N - M`` in its blocks.
            pos_encoding_mode: ``"NONE"``.
            use_fp16_qk_reduction: accepted and ignored.
            logits_soft_cap, sm_scale: as for :func:`flashinfer.single_prefill_with_kv_cache`.
            rope_scale, rope_theta: accepted and ignored.
            q_data_type, kv_data_type, o_data_type: dtypes of the runs. By default, keys have the queries'
                dtype and the output is float16.
            non_blocking: copy tables in pinned memory without waiting.

        Raises:
            ValueError: tables, masks, sizes or modes that do not fit.
            TypeError: dtypes that do not fit.
        """
        op = f"{self._name}.plan"
        check_no_positions(op, pos_encoding_mode)
        given = index_tables(op, indptr=indptr, indices=indices)
        for name, value, least in (("M", M, 0), ("N", N, 0), ("R", R, 1), ("C", C, 1)):
            whole(op, name, value, least)
        check_multiple(op, "N", N, "C", C)
        rows = -(-M // R)
        needs_mask = bool(causal) and mask is None and packed_mask is None
        near, near_indices = on_host(given["indptr"], given["indices"] if needs_mask else None)
        check_offsets(op, "indptr", near, rows)
        qo_indptr = torch.clamp(torch.arange(rows + 1, device="cpu") * R, max=M).to(torch.int32)
        tables = Tables(op, self.device, non_blocking)
        last = torch.full((rows,), C, dtype=torch.int32, device="cpu")
        batch = paged_batch(tables, qo_indptr, C, given["indptr"], near, given["indices"], last)
        check_range(op, "indices", batch.kv_size - 1, most=N // C - 1)
        custom = None
        if packed_mask is None and mask is not None:
            custom = self._flat(op, mask, near, given["indices"].numel(), R, C)[
                : int((qo_indptr.diff().to(torch.int64) * batch.kv_lens).sum())
            ]
        elif needs_mask:
            blocks = near_indices[int(near[0]) : int(near[-1])].to(torch.int64).split(near.diff().tolist())
            positions = [(one[:, None] * C + torch.arange(C, device="cpu")).flatten() for one in blocks]
            custom = causal_mask(qo_indptr.diff().tolist(), (qo_indptr[:-1] + N - M).tolist(), positions)
        shape = Shape.of(op, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, o_data_type)
        options = (logits_soft_cap, sm_scale, rope_scale, rope_theta)
        self._plan_rows(tables, batch, shape, C, custom, packed_mask, needs_mask and custom is None, options)
        self._keys, self._block = N, C

    begin_forward = plan

    def _flat(
        self, op: str, mask: torch.Tensor, indptr: torch.Tensor, blocks: int, rows: int, columns: int
    ) -> torch.Tensor:
        """Return the masks of rows of blocks.

        ``mask`` has a mask for each block of ``indptr`` or ``indices``.
        """
        check_tensor(op, "mask", mask)
        wanted = (int(indptr[-1]), rows, columns)
        if mask.shape == (blocks, rows, columns):
            mask = mask[: wanted[0]]
        check_tensors(op, mask=(mask, wanted, (torch.bool,)))
        return convert_bsr_mask_layout(mask, indptr)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention with the planned mask.

        Args:
            q: ``[M, num_qo_heads, head_dim]``.
            k, v: ``[N, num_kv_heads, head_dim]``. The last dimension is contiguous; other strides are free.
                On CUDA rows start at multiples of 16 bytes.
            scale_q, scale_k, scale_v: factors of quantised values, as for
                :func:`flashinfer.single_prefill_with_kv_cache`.
            out: ``[M, num_qo_heads, head_dim]`` to write the output to. Allocated by default.
            lse: ``[M, num_qo_heads]`` float32, contiguous, to write the lse to.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted and ignored.

        Returns:
            ``[M, num_qo_heads, head_dim]`` of ``o_data_type``. With ``return_lse`` also ``[M, num_qo_heads]``
            float32.

        Raises:
            ValueError: no plan, or shapes, strides or devices that do not fit it.
            TypeError: dtypes that do not fit it.
        """
        op = f"{self._name}.run"
        self._planned_or_fail("run")
        for name, x in (("k", k), ("v", v)):
            check_dims(op, name, x, 3)
            check_as_planned(op, name, x.shape[0], self._keys, "rows")
        blocks = (self._keys // self._block, self._block)
        k, v = k.unflatten(0, blocks), v.unflatten(0, blocks)
        return self._run_paged(q, (k, v), (), (scale_q, scale_k, scale_v), out, lse, return_lse)

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Run with options that replace those of :meth:`plan` until the next plan. Deprecated."""
        self._options(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v, scale_q, scale_k, scale_v)  # type: ignore[return-value]


class VariableBlockSparseAttentionWrapper(BlockSparse):
    """Attention with blocks of any sizes, which may differ between key heads.

    Call ``plan()`` once for each mask, then ``run()`` for each layer.

    Args:
        float_workspace_buffer, backend: as for :class:`BlockSparseAttentionWrapper`.

    Raises:
        ValueError, TypeError: a buffer or a backend that does not fit.
    """

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Balance the work of a mask. Tables of a GPU are read back.

        Args:
            block_mask_map: ``[num_kv_heads, MB, NB]`` bool, True for blocks that exist.
            block_row_sz: ``[num_kv_heads, MB]`` integers, queries of each row of blocks. Each head's sum is
                ``qo_len``.
            block_col_sz: ``[num_kv_heads, NB]`` integers, keys of each column of blocks. Each head's sum is
                ``kv_len``. Kernels read sizes with a large common divisor faster.
            causal: query ``i`` sees the keys up to ``i + kv_len - qo_len`` in its blocks.
            num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type, non_blocking: as for
                :meth:`BlockSparseAttentionWrapper.plan`. The output has the queries' dtype.
            pos_encoding_mode, use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta: as
                for the same method.

        Raises:
            ValueError: sizes or modes that do not fit.
            TypeError: dtypes that do not fit.
        """
        op = f"{self._name}.plan"
        check_no_positions(op, pos_encoding_mode)
        shape = Shape.of(op, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type)
        blocks, row_sizes, column_sizes = sizes_on_host(op, num_kv_heads, block_mask_map, block_row_sz, block_col_sz)
        qo_len, kv_len = int(row_sizes[0].sum()), int(column_sizes[0].sum())
        # Pages of k and v, heads one after another. The page size is the greatest common divisor of all
        # blocks.
        page = max(math.gcd(*column_sizes.flatten().tolist()), 1)
        head_start = torch.arange(num_kv_heads, device="cpu")[:, None] * (kv_len // page)
        counts = column_sizes // page
        starts = counts.cumsum(1) - counts + head_start
        head, _, column = blocks.nonzero(as_tuple=True)
        lens = counts[head, column]
        first = (starts[head, column] - lens.cumsum(0) + lens).repeat_interleave(lens)
        indices = torch.arange(first.numel(), device="cpu") + first
        pages = (blocks * counts[:, None, :]).sum(-1).flatten()
        indptr, qo_indptr = (
            torch.nn.functional.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (pages, row_sizes.flatten())
        )
        tables = Tables(op, self.device, non_blocking)
        last = torch.full((pages.numel(),), page, dtype=torch.int32, device="cpu")
        batch = paged_batch(tables, qo_indptr, page, indptr, indptr, indices.to(torch.int32), last)
        custom = None
        if causal:
            first = (row_sizes.cumsum(1) - row_sizes + kv_len - qo_len).flatten()
            own = (indices - head_start[head, 0].repeat_interleave(lens)).split(pages.tolist())
            positions = [(one[:, None] * page + torch.arange(page, device="cpu")).flatten() for one in own]
            custom = causal_mask(row_sizes.flatten().tolist(), first.tolist(), positions)
        shape = shape._replace(num_qo_heads=num_qo_heads // num_kv_heads, num_kv_heads=1)
        options = (logits_soft_cap, sm_scale, rope_scale, rope_theta)
        self._plan_rows(tables, batch, shape, page, custom, None, bool(causal) and custom is None, options)
        self._wanted = ((num_qo_heads, qo_len, head_dim), (num_kv_heads, kv_len, head_dim))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute attention with the planned mask.

        Args:
            q: ``[num_qo_heads, qo_len, head_dim]``.
            k, v: ``[num_kv_heads, kv_len, head_dim]``, copied if they are not contiguous.
            out: ``[num_qo_heads, qo_len, head_dim]`` to write the output to. Allocated by default.
            lse: ``[num_qo_heads, qo_len]`` float32 to write the lse to.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted and ignored.

        Returns:
            ``[num_qo_heads, qo_len, head_dim]`` of the queries' dtype. With ``return_lse`` also
            ``[num_qo_heads, qo_len]`` float32.

        Raises:
            ValueError: no plan, or shapes or devices that do not fit it.
            TypeError: dtypes that do not fit it.
        """
        op = f"{self._name}.run"
        planned = self._planned_or_fail("run")
        q_shape, kv_shape = self._wanted
        heads, qo_len, dim = q_shape
        check_tensors(
            op, q=(q, q_shape), k=(k, kv_shape), v=(v, kv_shape), out=(out, ("?", *q_shape), (planned.shape.dtype_o,)),
            lse=(lse, ("?", heads, qo_len), (torch.float32,)),
        )  # fmt: skip
        # Each request has one key head, and the query heads of its group.
        kv_heads, kv_len, _ = kv_shape
        group, page = heads // kv_heads, planned.workload.page_size or 1
        per_head = q.unflatten(0, (kv_heads, group)).transpose(1, 2).reshape(kv_heads * qo_len, group, dim)
        k, v = (x.reshape(kv_heads * kv_len // page, page, 1, dim) for x in (k, v))
        results = self._run_paged(per_head, (k, v), (), (None, None, None), None, None, True)
        got, got_lse = (
            x.unflatten(0, (kv_heads, qo_len)).transpose(1, 2).reshape(heads, qo_len, *x.shape[2:]) for x in results
        )
        if out is not None:
            got = out.copy_(got)
        if lse is not None:
            got_lse = lse.copy_(got_lse)
        return (got, got_lse) if return_lse else got

    run_return_lse = partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Run with options that replace those of :meth:`plan` until the next plan. Deprecated."""
        self._options(pos_encoding_mode, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        return self.run(q, k, v)  # type: ignore[return-value]
