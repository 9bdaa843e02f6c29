"""Tables of paged caches: slots of tokens, lengths, offsets of blocks."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

import flashinfer
from flashinfer.page import block_sparse_indices_to_vector_sparse_offsets

from .test_page import Requests, int32


@pytest.mark.parametrize("batch", [0, 1, 2, 5, 300])
def test_batch_indices_and_positions(batch, device):
    requests = Requests(batch, 4, device)
    got = flashinfer.get_batch_indices_positions(requests.append_indptr, int32(requests.seq_lens, device), requests.nnz)
    assert [tensor.dtype for tensor in got] == [torch.int32, torch.int32]
    assert got[0].tolist() == requests.batch_indices.tolist()
    assert got[1].tolist() == requests.positions.tolist()


@pytest.mark.parametrize(
    "indptr, lens, nnz, message",
    [
        ([0, 2, 5], [2, 3], 7, r"nnz: got 7, wanted append_indptr\[-1\], 5"),
        ([0, 2, 5], [2, 3], 4, r"append_indptr\[2\]: got 5, wanted 2 to 4"),
        ([-1, 2, 5], [3, 3], 5, r"append_indptr\[0\]: got -1, wanted 0 to 5"),
        ([0, 6, 5], [6, 3], 5, r"append_indptr\[1\]: got 6, wanted 0 to 5"),
        ([0, 2, 1], [2, 3], 1, r"append_indptr"),
        ([0, 2, 5], [2, 2], 5, r"seq_lens\[1\]: got 2, wanted 3 to"),
    ],
)
def test_tokens_of_no_request(indptr, lens, nnz, message, device):
    call = int32(indptr, device), int32(lens, device), nnz
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            flashinfer.get_batch_indices_positions(*call)
        return
    batch_indices, positions = (tensor.tolist() for tensor in flashinfer.get_batch_indices_positions(*call))
    assert all(-1 <= request < len(lens) for request in batch_indices)
    if nnz == 7:
        assert batch_indices == [0, 0, 1, 1, 1, -1, -1] and positions == [0, 1, 0, 1, 2, -1, -1]


@pytest.mark.parametrize("batch", [0, 1, 5, 300])
def test_buffers_of_a_graph(batch, device):
    """Tokens after the last request are padding."""
    requests = Requests(batch, 4, device)
    size, lens = requests.nnz + 3, int32(requests.seq_lens, device)
    buffers = [torch.full((size + 2,), 7, dtype=torch.int32, device=device) for _ in "12"]
    given = [buffer[1 : size + 1] for buffer in buffers]
    got = flashinfer.get_batch_indices_positions(requests.append_indptr, lens, size, *given)
    assert got[0] is given[0] and got[1] is given[1]
    for buffer, want in zip(buffers, (requests.batch_indices, requests.positions), strict=True):
        assert buffer.tolist() == [7, *want.tolist(), -1, -1, -1, 7]


def test_bad_buffers(device):
    indptr, lens = int32([0, 1, 3], device), int32([1, 2], device)
    good = int32([7] * 3, device), int32([7] * 3, device)
    for error, message, buffers in (
        (TypeError, "positions: got NoneType, wanted Tensor", (good[0], None)),
        (TypeError, "batch_indices: got NoneType, wanted Tensor", (None, good[1])),
        (TypeError, "positions: got int64, wanted int32", (good[0], good[1].long())),
        (ValueError, r"batch_indices: got shape \[2\], wanted \[3\], which is nnz", (good[0][:2], good[1][:2])),
        (ValueError, "positions: got", (good[0], good[1][:2])),
        (ValueError, "overlaps", (good[0], good[0])),
        (ValueError, "overlaps", (indptr, good[1])),
    ):
        with pytest.raises(error, match=f"get_batch_indices_positions: .*{message}"):
            flashinfer.get_batch_indices_positions(indptr, lens, 3, *buffers)
    assert good[0].tolist() == good[1].tolist() == [7] * 3


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_seq_lens(page_size, device):
    for batch in (0, 1, 300):
        requests = Requests(batch, page_size, device)
        got = flashinfer.get_seq_lens(requests.kv_indptr, requests.kv_last_page_len, page_size)
        assert got.dtype == torch.int32 and got.tolist() == requests.seq_lens


def test_seq_lens_compile_nothing():
    """A compiled module is not worth four instructions."""
    program = """
import torch, flashinfer
import flashinfer.jit.load as load
def refuse(*_, **__):
    raise AssertionError("get_seq_lens() loads a module")
load.load = refuse
lens = flashinfer.get_seq_lens(torch.tensor([0, 2, 2, 3]), torch.tensor([3, 0, 4]), 4)
assert lens.tolist() == [7, 0, 4] and lens.dtype == torch.int32, lens
assert not [name for name in torch.ops.loaded_libraries if "page" in name]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_bad_indices(device):
    two, three = int32([1, 2], device), int32([0, 1, 3], device)
    for call, error, message in [
        (lambda: flashinfer.get_seq_lens(two, two, 4), ValueError, r"kv_indptr: got shape \[2\], wanted \[3\]"),
        (lambda: flashinfer.get_seq_lens(three, two, 0), ValueError, "page_size: got 0"),
        (
            lambda: flashinfer.get_seq_lens(three, two, 2**31),
            ValueError,
            "page_size: got 2147483648, wanted 1 to 2147483647",
        ),
        (lambda: flashinfer.get_seq_lens(three.float(), two, 4), TypeError, "kv_indptr: got torch.float32"),
        (
            lambda: flashinfer.get_seq_lens(three, two.view(1, 2), 4),
            ValueError,
            r"kv_last_page_len: got shape \[1, 2\], wanted a vector",
        ),
        (
            lambda: flashinfer.get_batch_indices_positions(two, two, 3),
            ValueError,
            r"append_indptr: got shape \[2\], wanted \[3\]",
        ),
        (lambda: flashinfer.get_batch_indices_positions(three, two.bool(), 3), TypeError, "seq_lens: got bool"),
        (lambda: flashinfer.get_batch_indices_positions(three, two, -1), ValueError, "nnz: got -1"),
        (
            lambda: flashinfer.get_batch_indices_positions(three, two, 10**18),
            ValueError,
            "nnz: got 1000000000000000000",
        ),
        (lambda: flashinfer.get_batch_indices_positions(three, two, 1.5), TypeError, "nnz"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_a_length_beyond_int32_on_the_cpu():
    with pytest.raises(ValueError, match=r"kv_indptr\[1\]: got 2147483649, wanted 0 to 2147483647"):
        flashinfer.get_seq_lens(int32([0, 1, 4], "cpu"), int32([1, 3], "cpu"), (2**31 - 2) // 2)


def block_offsets(indices, first, starts, lens, strides, block_size, size, device):
    out = torch.full((size,), -77, dtype=torch.int32, device=device)
    tensors = int32(indices, device), int32(first, device), out, int32(starts, device), int32(lens, device)
    return block_sparse_indices_to_vector_sparse_offsets(*tensors, *strides, block_size).tolist()


def test_numbers_beyond_int32(device):
    for strides, block_size, name in [
        ((1, 1), 2**63 - 1, "block_size"),
        ((2**62, 1), 1, "stride_block"),
        ((1, -(2**62)), 1, "stride_n"),
    ]:
        with pytest.raises(ValueError, match=f"{name}: got -?[0-9]+, wanted -?[0-9]+ to 2147483647"):
            block_offsets([0], [1, 1], [0, 2], [2], strides, block_size, 2, device)


def test_only_existing_entries_must_be_int32(device):
    got = block_offsets([1, 2], [0, 2], [0, 5], [5], (10, 2**29), 4, 5, device)
    assert got == [10, 10 + 2**29, 10 + 2**30, 10 + 3 * 2**29, 20]
    got = block_offsets([3], [0, 1], [0, 1], [1], (10, 2**30), 1000, 1, device)
    assert got == [30]


@pytest.mark.parametrize("block_size, stride_block, stride_n", [(1, 1, 1), (1, 7, 1), (16, 16 * 64, 64), (3, 5, -2)])
def test_block_sparse_offsets(block_size, stride_block, stride_n, device):
    lens = [random.randrange(3000) for _ in range(random.choice([1, 5]))] + [0]
    blocks = [-(-length // block_size) for length in lens]
    indices = [random.randrange(10000) for _ in range(sum(blocks) + 1)]
    starts, first = [sum(lens[:i]) for i in range(len(lens) + 1)], [sum(blocks[:i]) for i in range(len(lens) + 1)]
    want = [
        indices[first[b] + i // block_size] * stride_block + i % block_size * stride_n
        for b, length in enumerate(lens)
        for i in range(length)
    ]
    out = torch.full((sum(lens) + 9,), -77, dtype=torch.int32, device=device)
    got = block_sparse_indices_to_vector_sparse_offsets(
        int32(indices, device),
        int32(first, device),
        out,
        int32(starts, device),
        int32(lens, device),
        stride_block,
        stride_n,
        block_size,
    )
    assert got is out and out.tolist() == want + [-77] * 9


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(indices=[5, 2**30]), r"an offset of block_sparse_indices\[1\]: got 4294967296"),
        (dict(lens=[2, 3]), r"block_sparse_indptr\[1\]: got 1, wanted 0 to 0"),
        (dict(starts=[0, 9, 9]), r"vector_sparse_indptr\[1\]: got 9, wanted 0 to 6"),
        (dict(starts=[-1, 2, 4]), r"vector_sparse_indptr\[0\]: got -1"),
        (dict(first=[0, 2, 2]), r"block_sparse_indptr\[1\]: got 2"),
        (dict(lens=[2, 2], first=[-1, 1, 2]), r"block_sparse_indptr\[0\]: got -1"),
    ],
)
def test_block_sparse_indices_out_of_range(change, message, device):
    given = dict(indices=[5, 6], first=[0, 1, 2], starts=[0, 2, 4], lens=[2, 2]) | change
    out = torch.full((8,), -77, dtype=torch.int32, device=device)
    around = torch.full((24,), -77, dtype=torch.int32, device=device)
    out = around[8:16]
    tensors = {name: int32(value, device) for name, value in given.items()}
    call = (tensors["indices"], tensors["first"], out, tensors["starts"], tensors["lens"], 4, 1, 2)
    if device == "cpu":
        with pytest.raises(ValueError, match=message):
            block_sparse_indices_to_vector_sparse_offsets(*call)
        assert bool((out == -77).all())
    else:
        block_sparse_indices_to_vector_sparse_offsets(*call)
    assert bool((around[:8] == -77).all()) and bool((around[16:] == -77).all())
