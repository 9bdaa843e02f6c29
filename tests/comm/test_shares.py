"""Reduce-scatter and all-gather of ranks that are threads: values, bits, aliases, faults, and refused arguments."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.shares import all_gather, reduce_scatter
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as Pattern
from flashinfer.errors import GradientError, GroupError

from ..conftest import DTYPES
from .cases import assert_same_bits, one_rank, summed

SUM = Pattern.kAllReduce
# Rows of a share and columns: shares that fill CTAs, that do not, and that begin at any element.
SHAPES = [(1, 4096), (3, 640), (133, 16), (1, 1), (2, 7), (5, 129), (0, 64), (3, 0), (64, 2880)]


def drawn(size: int, rows: int, hidden: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    return [torch.randn(rows, hidden, device=device).to(dtype) for _ in range(size)]


def filled(rows: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((rows, like.shape[1]), 77, dtype=like.dtype, device=like.device)


def sizes_of(device: str) -> list[int]:
    return [2, 3, 4, 8] if device == "cuda" else [2, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype, device, make_group):
    """The shares of the all-reduce, and then its whole result on every rank."""
    for size in sizes_of(device):
        group = make_group(size, max(rows * (hidden + 8) for rows, hidden in SHAPES) // 64 + 1, 64, dtype)
        for rows, hidden in SHAPES if device == "cuda" else random.sample(SHAPES, 6):
            parts = drawn(size, size * rows, hidden, dtype, device)
            kept = [x.clone() for x in parts]
            shares, wholes = [filled(rows, x) for x in parts], [filled(size * rows, x) for x in parts]
            pdl = random.random() < 0.5

            def body(
                rank: int, one: Any, parts: Any = parts, shares: Any = shares, wholes: Any = wholes, pdl: bool = pdl
            ) -> None:
                assert reduce_scatter(parts[rank], one, shares[rank], pdl) is shares[rank]
                assert all_gather(shares[rank], one, wholes[rank], pdl) is wholes[rank]

            group.run(body)
            total = summed(parts)
            for rank in range(size):
                assert_same_bits(shares[rank], total[rank * rows : (rank + 1) * rows])
                assert_same_bits(wholes[rank], total)
                assert torch.equal(parts[rank], kept[rank]), "an input changed"


def test_outputs_are_allocated(device):
    x = torch.randn(3, 5, device=device)
    for function in (reduce_scatter, all_gather):
        got = function(x, one_rank(device))
        assert got.data_ptr() != x.data_ptr() and torch.equal(got, x)


@pytest.mark.parametrize("hidden", [64, 9])
def test_in_place(hidden, device, make_group):
    """A share inside the whole tensor, as NCCL allows it."""
    size, rows, dtype = 3, 5, torch.bfloat16
    group = make_group(size, rows, 64, dtype)
    parts = drawn(size, size * rows, hidden, dtype, device)
    total, kept = summed(parts), [x.clone() for x in parts]

    def own(rank: int) -> torch.Tensor:
        return parts[rank][rank * rows : (rank + 1) * rows]

    group.run(lambda rank, one: reduce_scatter(parts[rank], one, own(rank)))
    for rank in range(size):
        kept[rank][rank * rows : (rank + 1) * rows] = total[rank * rows : (rank + 1) * rows]
        assert torch.equal(parts[rank], kept[rank])
    group.run(lambda rank, one: all_gather(own(rank), one, parts[rank]))
    for x in parts:
        assert_same_bits(x, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_word_is_sent(dtype, device, make_group):
    """NaN of all bits, infinities, zeros of both signs and the least numbers arrive, equal on all ranks."""
    group = make_group(2, 4, 64, dtype)
    parts, whole = drawn(2, 4, 64, dtype, device), torch.int32 if dtype.itemsize == 4 else torch.int16
    parts[0].view(whole)[0], parts[1].view(whole)[1, ::3] = -1, -1  # the empty word
    parts[0][2, :8], parts[1][2, 4:12], parts[0][2, 12] = float("inf"), float("-inf"), -0.0
    parts[1].view(whole)[3] = 1
    outs = [filled(8, x) for x in parts]
    group.run(lambda rank, one: all_gather(parts[rank], one, outs[rank]))
    for x in outs:
        assert_same_bits(x, torch.cat(parts))
    assert torch.equal(outs[0].view(whole), outs[1].view(whole)), "NaN has other bits on another rank"


def test_calls_in_turns(device, make_group):
    """Functions of one workspace in a random order and in random shapes, without a wait between them."""
    size, dtype, count = 4, torch.float16, 200
    group = make_group(size, 16, 640, dtype)
    calls = []
    for _ in range(count):
        name, rows, hidden = random.choice("sgr"), random.randint(0, 4), random.randint(1, 80) * 8
        parts = drawn(size, rows if name == "g" else rows * size, hidden, dtype, device)
        outs = [filled({"s": rows, "g": rows * size, "r": rows * size}[name], x) for x in parts]
        calls.append((name, rows, parts, outs))

    def body(rank: int, one: Any) -> None:
        for number, (name, _, parts, outs) in enumerate(calls):
            if name == "s":
                reduce_scatter(parts[rank], one, outs[rank], True)
            elif name == "g":
                all_gather(parts[rank], one, outs[rank], True)
            else:
                allreduce_fusion(parts[rank], one, SUM, True, output=outs[rank])
            group.bound_launches(rank, number)

    group.run(body)
    for name, rows, parts, outs in calls:
        want = torch.cat(parts) if name == "g" else summed(parts)
        for rank, out in enumerate(outs):
            assert_same_bits(out, want[rank * rows : (rank + 1) * rows] if name == "s" else want)


def test_graphs_replay(device, make_group):
    if device != "cuda":
        pytest.skip("needs a GPU")
    size, rows, hidden, dtype = 4, 9, 4096, torch.bfloat16
    group = make_group(size, rows, hidden, dtype)
    parts = drawn(size, size * rows, hidden, dtype, device)
    shares, wholes = [filled(rows, x) for x in parts], [filled(size * rows, x) for x in parts]
    graphs = [torch.cuda.CUDAGraph() for _ in parts]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            reduce_scatter(parts[rank], group.workspaces[rank], shares[rank], True)
            all_gather(shares[rank], group.workspaces[rank], wholes[rank], True)
    for _ in range(3):
        for x, new in zip(parts, drawn(size, size * rows, hidden, dtype, device), strict=True):
            x.copy_(new)

        def body(rank: int, _: Any) -> None:
            for number in range(200):
                graphs[rank].replay()
                group.bound_launches(rank, number)

        group.run(body)
        for x in wholes:
            assert_same_bits(x, summed(parts))


def test_compiled(device, cold_dynamo):
    """One graph: the operators' order and table reach the kernels."""
    workspace, x = one_rank(device), torch.randn(6, 64, device=device)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return all_gather(reduce_scatter(x, workspace) * 2, workspace)

    before = int(workspace._state[0])
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), x * 2)
    assert int(workspace._state[0]) == before + 2


# Faults


def test_a_rank_that_does_not_arrive(device, make_group, monkeypatch):
    """The others raise within the bound, naming it and the function. What is missing is NaN."""
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "2")
    x = torch.ones(6, 64, device=device)
    for function, rows in ((reduce_scatter, 2), (all_gather, 18)):
        group = make_group(3, 6, 64, torch.float32)
        outs = [filled(rows, x) for _ in range(3)]

        def body(rank: int, one: Any, function: Any = function, outs: Any = outs) -> None:
            if rank != 2:
                function(x, one, outs[rank])

        began = time.monotonic()
        outcomes = group.outcomes(body)
        assert 2 <= time.monotonic() - began < 50 and outcomes[2] is None
        for one, out in zip(outcomes[:2], outs[:2], strict=True):
            assert isinstance(one, GroupError) and one.ranks == (2,)
            assert str(one) == f"{function.__name__}: rank 2 did not arrive within 2 s in call 0"
            assert out[-2:].isnan().all()
        with pytest.raises(GroupError, match=f"^{function.__name__}: rank 2 did not arrive"):
            function(x, group.workspaces[0], outs[0])


def test_another_call_on_one_rank(device, make_group):
    """Both ranks raise at once, naming both calls."""
    group, x = make_group(2, 4, 64, torch.float32), torch.ones(4, 64, device=device)
    outs, whole = filled(2, x), filled(8, x)
    began = time.monotonic()
    outcomes = group.outcomes(
        lambda rank, one: reduce_scatter(x, one, outs) if rank == 0 else all_gather(x, one, whole)
    )
    assert time.monotonic() - began < 50, "a rank waited for its time-out"
    for rank, one in enumerate(outcomes):
        assert isinstance(one, GroupError) and one.ranks == (1 - rank, rank)
        texts = "2 rows of 256 bytes, float32, reduce_scatter", "4 rows of 256 bytes, float32, all_gather"
        assert all(text in str(one) for text in texts)
    again = make_group(2, 4, 64, torch.float32)
    again.run(lambda rank, one: reduce_scatter(x, one, outs) if rank == 0 else reduce_scatter(x, one, whole[:2]))
    assert (outs == 2).all() and (whole[:2] == 2).all()


# Arguments


def test_invalid_arguments(device, make_group):
    group = make_group(2, 4, 64, torch.float32)
    one, x = group.workspaces[0], torch.randn(4, 64, device=device)
    long, memory = torch.randn(10, 64, device=device), torch.full((9, 64), 77.0, device=device)
    before = int(one._state[0])
    for text, function, given in (
        ("reduce_scatter: input: got 3 rows, wanted a multiple of the 2 ranks", reduce_scatter, (x[:3], one)),
        ("reduce_scatter: input: got 3 rows, wanted a multiple of", reduce_scatter, (x[:3], one, memory[:1])),
        ("reduce_scatter: input: got 1 dimensions, wanted 2", reduce_scatter, (x[0], one)),
        ("reduce_scatter: input: is not contiguous", reduce_scatter, (x.T, one)),
        (r"reduce_scatter: output: got shape \[4, 64\], wanted \[2, 64\]", reduce_scatter, (x, one, memory[:4])),
        ("reduce_scatter: output: overlaps the memory of input", reduce_scatter, (memory[:4], one, memory[1:3])),
        ("reduce_scatter: output: overlaps the memory of input", reduce_scatter, (memory[:4], one, memory[2:4])),
        ("reduce_scatter: input: got 1280 bytes for each rank", reduce_scatter, (long, one)),
        (r"all_gather: output: got shape \[4, 64\], wanted \[8, 64\]", all_gather, (x, one, memory[:4])),
        ("all_gather: output: overlaps the memory of input", all_gather, (memory[4:8], one, memory[:8])),
        ("all_gather: output: is not contiguous", all_gather, (x[:1, :2], one, memory[:2, :2])),
        ("all_gather: input: got 1280 bytes for each rank", all_gather, (long[:5], one)),
    ):
        with pytest.raises(ValueError, match=f"^{text}"):
            function(*given)
    for text, function, given in (
        ("reduce_scatter: input: got NoneType", reduce_scatter, (None, one)),
        ("all_gather: workspace: got int, wanted TRTLLMAllReduceFusionWorkspace", all_gather, (x, 3)),
        ("all_gather: input: got float64, wanted float32", all_gather, (x.double(), one)),
        ("all_gather: output: got float16, wanted float32 as input has", all_gather, (x, one, memory[:8].half())),
    ):
        with pytest.raises(TypeError, match=f"^{text}"):
            function(*given)
    with pytest.raises(GradientError, match="has no gradient"):
        all_gather(x.requires_grad_(), one)
    assert int(one._state[0]) == before and (memory == 77).all(), "a kernel ran"
    group.destroy()
    with pytest.raises(ValueError, match="all_gather: workspace: got one after destroy"):
        all_gather(x.detach(), one)
