"""Block-sparse attention against float64 attention with a dense mask."""

from __future__ import annotations

import math
import random

import pytest
import torch

import flashinfer

from ..support.attention_oracle import (
    FLOAT8_CASES,
    Paged,
    assert_near,
    attention,
    drawn,
    indptr_of,
    int32,
    variant_dtype,
)
from ..support.plans import plan_of

DIM = 64
CHOICES = [(1, 1), (1, 16), (16, 1), (4, 8), (7, 5)]


def workspace(device: str) -> torch.Tensor:
    return torch.empty(16 << 20, dtype=torch.uint8, device=device)


def needs_kernels(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("CUDA has no float32 queries")


class Blocks:
    """Random block compressed rows, some of them empty, and the dense mask that they describe."""

    def __init__(self, M: int, N: int, R: int, C: int, inside: bool = False, sort: bool = True, density: float = 0.4):
        rows, columns = -(-M // R), N // C
        there = torch.rand(rows, columns) < density
        there[random.randrange(rows)] = False
        tables = [one.nonzero().flatten().tolist() for one in there]
        if not sort:
            for table in tables:
                random.shuffle(table)
        self.indptr, self.indices = indptr_of([len(one) for one in tables]), int32([x for one in tables for x in one])
        shape = (int(self.indptr[-1]), R, C)
        self.mask = torch.rand(shape) < 0.5 if inside else torch.ones(shape, dtype=torch.bool)
        self.dense = torch.zeros(rows * R, N, dtype=torch.bool)
        for row in range(rows):
            for at in range(int(self.indptr[row]), int(self.indptr[row + 1])):
                column = int(self.indices[at]) * C
                self.dense[row * R : (row + 1) * R, column : column + C] = self.mask[at]
        self.dense = self.dense[:M]

    def on(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.indptr.to(device), self.indices.to(device)


def inputs(M: int, N: int, dtype: torch.dtype, device: str, heads: int = 6, kv_heads: int = 2):
    return (drawn((n, h, DIM), dtype, device) for n, h in ((M, heads), (N, kv_heads), (N, kv_heads)))


@pytest.mark.parametrize("R, C", CHOICES)
@pytest.mark.parametrize("inside", [False, True], ids=["whole blocks", "mask in blocks"])
def test_blocks(R, C, inside, dtype, device):
    needs_kernels(dtype, device)
    M, N = 45, 7 * C if C > 4 else 40 * C
    blocks = Blocks(M, N, R, C, inside, sort=False)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    mask = blocks.mask.to(device) if inside else None
    wrapper.plan(*blocks.on(device), M, N, R, C, 6, 2, DIM, mask, q_data_type=dtype, o_data_type=dtype)
    q, k, v = inputs(M, N, dtype, device)
    want, want_lse = attention(q, k, v, mask=blocks.dense)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert_near(out, want, lse, want_lse)
    given = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    assert wrapper.run(q, k, v, out=given[0], lse=given[1]) is given[0]
    assert torch.equal(given[0], out) and torch.equal(given[1], lse)
    if inside:  # packed by the caller
        flat = flashinfer.convert_bsr_mask_layout(blocks.mask, blocks.indptr)
        packed, _ = flashinfer.segment_packbits(flat.to(device), blocks.indptr.to(device) * R * C, bitorder="little")
        wrapper.plan(*blocks.on("cpu"), M, N, R, C, 6, 2, DIM, packed_mask=packed, q_data_type=dtype, o_data_type=dtype)
        assert torch.equal(wrapper.run(q, k, v), out)


@pytest.mark.parametrize("M, N, R, C", [(48, 48, 8, 8), (48, 48, 16, 4), (30, 64, 8, 8), (64, 32, 8, 8)])
def test_causal_is_of_the_whole_matrix(M, N, R, C, device):
    """Query i sees keys up to i + N - M, for any positions of its row's blocks."""
    blocks = Blocks(M, N, R, C, density=0.6)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(*blocks.on(device), M, N, R, C, 6, 2, DIM, causal=True)
    q, k, v = inputs(M, N, torch.float16, device)
    seen = blocks.dense & (torch.arange(N)[None, :] <= torch.arange(M)[:, None] + N - M)
    want, want_lse = attention(q, k, v, mask=seen)
    out, lse = wrapper.run_return_lse(q, k, v)
    assert_near(out, want, lse, want_lse)


def test_causal_with_blocks_on_the_diagonal(device):
    """Lower triangles of blocks use the kernels' own causal mask."""
    M, R = 64, 16
    indptr, indices = indptr_of(range(1, 5)), int32([c for row in range(4) for c in range(row + 1)])
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr, indices, M, M, R, R, 6, 2, DIM, causal=True)
    assert plan_of(wrapper).workload.masks.packed is None
    q, k, v = inputs(M, M, torch.float16, device)
    assert_near(wrapper.run(q, k, v), attention(q, k, v, causal=True)[0])


def test_options(device):
    M, N, R, C = 24, 64, 8, 16
    blocks = Blocks(M, N, R, C)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device), "fa2")
    options, dtype = {"logits_soft_cap": 3.0, "sm_scale": 0.3}, variant_dtype(device)
    sizes = (M, N, R, C, 6, 2, DIM)
    wrapper.begin_forward(*blocks.on(device), *sizes, q_data_type=dtype, o_data_type=dtype, **options)
    q, k, v = inputs(M, N, dtype, device)
    assert_near(wrapper.run(q, k, v), attention(q, k, v, mask=blocks.dense, **options)[0])


@pytest.mark.slow
def test_the_output_is_float16_by_default(device):
    """FlashInfer's wrapper has the same default for queries of every dtype."""
    M, N, R, C = 24, 64, 8, 16
    blocks = Blocks(M, N, R, C)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(*blocks.on(device), M, N, R, C, 6, 2, DIM, q_data_type=torch.bfloat16)
    q, k, v = inputs(M, N, torch.bfloat16, device)
    out = wrapper.run(q, k, v)
    assert out.dtype == torch.float16
    assert_near(out, attention(q, k, v, mask=blocks.dense)[0], tolerance=1.6e-2)  # bfloat16's


@pytest.mark.parametrize("kv_dtype", FLOAT8_CASES, ids=["e4m3", "e5m2"])
def test_quantised_keys_and_strides(kv_dtype, device):
    M, N, R, C = 20, 48, 4, 16
    blocks = Blocks(M, N, R, C)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(*blocks.on(device), M, N, R, C, 6, 2, DIM, kv_data_type=kv_dtype)
    q = drawn((M, 6, DIM), torch.float16, device)
    k, v = (drawn((2, N, 2, DIM + 16), kv_dtype, device)[1, :, :, 16:] for _ in range(2))
    assert not k.is_contiguous()
    out = wrapper.run(q, k, v, scale_q=0.5, scale_k=torch.tensor([2.0, 3.0], device=device), scale_v=0.25)
    k_scale = torch.tensor([1.0, 1.5]).view(1, 2, 1)
    want, _ = attention(q, k.cpu().float() * k_scale, v.cpu().float() * 0.25, mask=blocks.dense)
    assert_near(out, want)


def test_empty_matrices(device):
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(int32([0, 0, 0], device), int32([], device), 5, 0, 4, 8, 6, 2, DIM)
    q, k, v = inputs(5, 0, torch.float16, device)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()
    wrapper.plan(int32([0], device), int32([], device), 0, 16, 4, 8, 6, 2, DIM)
    q, k, v = inputs(0, 16, torch.float16, device)
    assert wrapper.run(q, k, v).shape == (0, 6, DIM)


@pytest.mark.parametrize("change, error, message", [
    ({"M": 17}, ValueError, "indptr: got 3 elements, wanted 4"),
    ({"N": 33}, ValueError, "N: got 33, wanted a multiple of C, 8"),
    ({"R": 2.5}, TypeError, "R: got 2.5, wanted an integer"),
    ({"R": 0}, ValueError, "R: got 0, wanted at least 1"),
    ({"indptr": int32([0, 2, 1])}, ValueError, "indptr: got 1 at 2 after 2"),
    ({"indptr": int32([0, 1, 9])}, ValueError, "indices: got 3 pages, wanted at least 9, the end of indptr"),
    ({"indptr": torch.tensor([0.0, 1, 3])}, TypeError, "indptr: got torch.float32, wanted torch.int32"),
    ({"indices": int32([0, 4, 1])}, ValueError, "indices: got 4, wanted at most 3"),
    ({"indices": int32([0, -1, 1])}, ValueError, "indices: got -1, wanted"),
    ({"mask": torch.ones(3, 8, 4, dtype=torch.bool)}, ValueError, r"mask: got shape \[3, 8, 4\], wanted \[3, 8, 8\]"),
    ({"mask": torch.ones(3, 8, 8)}, TypeError, "mask: got torch.float32, wanted torch.bool"),
    ({"packed_mask": torch.zeros(3, dtype=torch.uint8)}, ValueError, "got 3 bytes, wanted at least 24"),
    ({"pos_encoding_mode": "ROPE_LLAMA"}, ValueError, "pos_encoding_mode: got 'ROPE_LLAMA', wanted 'NONE'"),
    ({"num_kv_heads": 4}, ValueError, "num_qo_heads: got 6, wanted a multiple of num_kv_heads, 4"),
    ({"head_dim": 0}, ValueError, "head_dim_qk: got 0, wanted a positive number"),
    ({"q_data_type": "float17"}, ValueError, "q_data_type: got 'float17'"),
])  # fmt: skip
def test_bad_plans(change, error, message):
    given = dict(indptr=int32([0, 1, 3]), indices=int32([0, 2, 1]), M=16, N=32, R=8, C=8, num_qo_heads=6, num_kv_heads=2,
                 head_dim=DIM)  # fmt: skip
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace("cpu"))
    wrapper.plan(**given)
    with pytest.raises(error, match=message):
        wrapper.plan(**{**given, **change})


def test_bad_runs(device):
    with pytest.raises(ValueError, match="BlockSparseAttentionWrapper: backend: got 'fa4'"):
        flashinfer.BlockSparseAttentionWrapper(workspace(device), "fa4")
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    q, k, v = inputs(16, 32, torch.float16, device)
    with pytest.raises(ValueError, match=r"BlockSparseAttentionWrapper.run: got no plan"):
        wrapper.run(q, k, v)
    wrapper.plan(int32([0, 1, 3]), int32([0, 2, 1]), 16, 32, 8, 8, 6, 2, DIM)
    with pytest.raises(ValueError, match="k: got 31 rows, and plan\\(\\) was called for 32"):
        wrapper.run(q, k[1:], v)
    with pytest.raises(ValueError, match="q: got 15 queries, and plan\\(\\) was called for 16"):
        wrapper.run(q[1:], k, v)
    with pytest.raises(ValueError, match="k: got 2 dimensions, wanted 3"):
        wrapper.run(q, k[0], v)
    with pytest.raises(TypeError, match="q: got torch.bfloat16"):
        wrapper.run(q.bfloat16(), k, v)
    with pytest.raises(ValueError, match="out: got shape"):
        wrapper.run(q, k, v, out=q[1:])
    with pytest.raises(TypeError, match="BlockSparseAttentionWrapper.run: scale_k: got str, wanted a number"):
        wrapper.run(q, k, v, scale_k="a")
    wrapper.reset_workspace_buffer(workspace(device), workspace(device))
    with pytest.raises(ValueError, match="got no plan"):
        wrapper.run(q, k, v)


def test_layout_of_masks(device):
    """Return for each row of blocks its queries in order, each with all keys of the row's blocks."""
    counts, R, C = [2, 0, 3, 1], 3, 4
    mask = torch.rand(sum(counts), R, C, device=device) < 0.5
    want = [one.transpose(0, 1).reshape(-1) for one in mask.split(counts)]
    for indptr in (indptr_of(counts), indptr_of(counts).long().to(device)):
        got = flashinfer.convert_bsr_mask_layout(mask, indptr)
        assert got.dtype == torch.bool and got.device == mask.device and torch.equal(got, torch.cat(want))
    with pytest.raises(ValueError, match="mask: got 2 dimensions, wanted 3"):
        flashinfer.convert_bsr_mask_layout(mask[0], indptr_of(counts))
    with pytest.raises(ValueError, match="indptr: got 3 blocks in all, wanted 6 as mask has"):
        flashinfer.convert_bsr_mask_layout(mask, indptr_of([1, 2]))
    with pytest.raises(ValueError, match="indptr: got -1 first, wanted 0 or more"):
        flashinfer.convert_bsr_mask_layout(mask, int32([-1, 6]))
    for kind in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(TypeError, match=f"convert_bsr_mask_layout: indptr: got {kind}, wanted torch.int64"):
            flashinfer.convert_bsr_mask_layout(mask, indptr_of(counts).to(kind))
    with pytest.raises(ValueError, match="convert_bsr_mask_layout: indptr: got a meta tensor"):
        flashinfer.convert_bsr_mask_layout(mask, indptr_of(counts).to("meta"))


# --- blocks of any sizes ---


def parts(total: int, count: int, step: int = 1) -> list[int]:
    """Return ``count`` multiples of ``step``, some 0, with sum ``total``."""
    cuts = sorted(random.randrange(total // step + 1) * step for _ in range(count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def variable(qo_len: int, kv_len: int, kv_heads: int, step: int):
    """Return tables for ``plan`` and the mask ``[num_kv_heads, qo_len, kv_len]`` that they describe."""
    rows = torch.tensor([parts(qo_len, 4) for _ in range(kv_heads)])
    columns = torch.tensor([parts(kv_len, 5, step) for _ in range(kv_heads)])
    blocks = torch.rand(kv_heads, 4, 5) < 0.5
    dense = [
        one.repeat_interleave(r, 0).repeat_interleave(c, 1) for one, r, c in zip(blocks, rows, columns, strict=True)
    ]
    return (blocks, rows, columns), torch.stack(dense)


@pytest.mark.parametrize("step", [1, 8])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 3)])
def test_variable_blocks(step, causal, heads, kv_heads, dtype, device):
    needs_kernels(dtype, device)
    qo_len, kv_len = 37, 96
    tables, dense = variable(qo_len, kv_len, kv_heads, step)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    options: dict[str, float] = {"sm_scale": 0.2} if step == 8 else {}
    if step == 8 and dtype == variant_dtype(device):
        options["logits_soft_cap"] = 4.0
    tables = [x.to(device) for x in tables]
    wrapper.plan(*tables, heads, kv_heads, DIM, causal, q_data_type=dtype, **options)
    assert plan_of(wrapper).workload.page_size % step == 0
    q, k, v = (drawn((h, n, DIM), dtype, device) for h, n in ((heads, qo_len), (kv_heads, kv_len), (kv_heads, kv_len)))
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    if causal:
        dense = dense & (torch.arange(kv_len)[None, :] <= torch.arange(qo_len)[:, None] + kv_len - qo_len)
    group = heads // kv_heads
    for h in range(heads):
        one = slice(h // group, h // group + 1)
        want, want_lse = attention(q[h][:, None], k[one].transpose(0, 1), v[one].transpose(0, 1), mask=dense[h // group],
                                   **options)  # fmt: skip
        assert_near(out[h][:, None], want, lse[h][:, None], want_lse)
    given = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
    got = wrapper.run(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, *given)
    assert got is given[0] and torch.equal(got, out) and torch.equal(given[1], lse)


def test_bad_variable_blocks(device):
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    (blocks, rows, columns), _ = variable(8, 16, 2, 1)
    name = "VariableBlockSparseAttentionWrapper"
    q, k = torch.zeros(4, 8, DIM, device=device).half(), torch.zeros(2, 16, DIM, device=device).half()
    with pytest.raises(ValueError, match=f"{name}.run: got no plan"):
        wrapper.run(q, k, k)
    plan = wrapper.plan
    for arguments, error, message in (
        ((blocks[0], rows, columns), ValueError, "block_mask_map: got 2 dimensions, wanted 3"),
        ((blocks.float(), rows, columns), TypeError, "block_mask_map: got torch.float32, wanted torch.bool"),
        ((blocks, rows.float(), columns), TypeError, "block_row_sz: got torch.float32, wanted integers"),
        ((blocks, rows[:, 1:], columns), ValueError, r"block_row_sz: got shape \[2, 3\], wanted \[2, 4\]"),
        ((blocks[:1], rows, columns), ValueError, r"block_mask_map: got shape \[1, 4, 5\], wanted \[2, 4, 5\]"),
        ((blocks, rows, columns - 17), ValueError, r"block_col_sz: got -\d+, wanted at least 0"),
        ((blocks, rows, columns + torch.tensor([[1], [0]])), ValueError, r"block_col_sz: got \[21, 16\] by head, wanted equal numbers"),
        (([], rows, columns), TypeError, "block_mask_map: got list, wanted Tensor"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            plan(*arguments, 4, 2, DIM)
    with pytest.raises(ValueError, match="pos_encoding_mode: got 'ALIBI', wanted 'NONE'"):
        plan(blocks, rows, columns, 4, 2, DIM, False, "ALIBI")
    plan(blocks, rows, columns, 4, 2, DIM)
    with pytest.raises(ValueError, match=r"k: got shape \[2, 15, 64\], wanted \[2, 16, 64\]"):
        wrapper.run(q, k[:, 1:], k)
    with pytest.raises(ValueError, match=r"q: got shape \[2, 8, 64\]"):
        wrapper.run(q[2:], k, k)
    with pytest.raises(ValueError, match=r"out: got shape \[4, 7, 64\], wanted \[4, 8, 64\]"):
        wrapper.run(q, k, k, out=q[:, 1:].contiguous())
    with pytest.raises(TypeError, match="lse: got torch.float16, wanted torch.float32"):
        wrapper.run(q, k, k, lse=q[..., 0].contiguous())


def test_pages_and_blocks_agree(device):
    """A row of blocks is a request over pages. Results are bit-equal to the paged wrapper's."""
    blocks = Blocks(32, 64, 8, 16)
    paged = Paged([64], 16, 2, DIM, torch.float16, device)
    k, v = (x.flatten(0, 1)[: 4 * 16].nan_to_num().to(device) for x in (paged.k, paged.v))
    q = drawn((32, 6, DIM), torch.float16, device)
    sparse = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    sparse.plan(*blocks.on(device), 32, 64, 8, 16, 6, 2, DIM)
    batch = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    last = torch.full((4,), 16, dtype=torch.int32)
    batch.plan(indptr_of([8] * 4), blocks.indptr, blocks.indices, last, 6, 2, DIM, 16)
    cache = (k.unflatten(0, (4, 16)), v.unflatten(0, (4, 16)))
    assert torch.equal(sparse.run(q, k, v), batch.run(q, cache))
