"""All-to-all of experts between ranks that are threads: rows, sums, order of calls, faults, and refused arguments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashinfer.comm.alltoall import MAX_PAYLOADS, MoeAlltoAll
from flashinfer.comm.alltoall import moe_a2a_get_workspace_size_per_rank as size_per_rank
from flashinfer.comm.mapping import Mapping
from flashinfer.comm.mnnvl import MnnvlConfig
from flashinfer.comm.workspace import EPOCH_WORDS
from flashinfer.errors import CaptureError, GradientError, GroupError

from ..conftest import DTYPES
from .cases import assert_same_bits
from .ranks import Meeting, Ranks, ThreadBackend, on_threads

BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Make = Callable[..., Ranks]


class Experts(Ranks):
    """Threads with an object of the all-to-all each."""

    def __init__(self, size: int, most: int, top_k: int, experts: int, device: str, **options: Any) -> None:
        def create(rank: int, backend: Any) -> MoeAlltoAll:
            mapping = Mapping(size, rank, tp_size=size, moe_ep_size=size)
            given = {"hidden_size": 64, **options}
            return MoeAlltoAll(mapping, most, top_k, experts, comm_backend=backend, device=device, **given)

        super().__init__(size, create, device)

    def check(self, rank: int) -> None:
        self.workspaces[rank].check()


@pytest.fixture
def make(device: str) -> Iterator[Make]:
    made = list[Experts]()

    def create(size: int, most: int = 8, top_k: int = 2, experts: int = 16, **options: Any) -> Experts:
        made.append(Experts(size, most, top_k, experts, device, **options))
        return made[-1]

    yield create
    for group in made:
        for one in group.workspaces:
            if one._region is not None:
                one._region._words[0] = 0  # an error that the test has seen
            one.destroy()


def sizes_of(device: str) -> list[int]:
    return [1, 2, 3, 4, 8] if device == "cuda" else [1, 2, 3]


class Call:
    """Inputs of a dispatch and its combine on all ranks, with their results."""

    def __init__(self, group: Ranks, most: int, top_k: int, experts: int, hidden: int, dtype: torch.dtype) -> None:
        self.size, self.most, self.experts, self.dtype = group.size, most, experts, dtype
        device = group.device
        counts = [random.randint(0, most) for _ in range(group.size)]
        self.ids = [torch.randint(-2, experts + 2, (count, top_k)).int().to(device) for count in counts]
        self.rows = [torch.randn(count, hidden, device=device).to(dtype) for count in counts]
        self.scales = [torch.randint(0, 256, (count, 3), device=device).to(torch.uint8) for count in counts]
        self.weights = [torch.rand(count, device=device) for count in counts]
        # Partial results of each rank: any numbers, so that a row in a wrong place shows.
        self.results = [torch.randn(group.size, most, hidden, device=device).to(dtype) for _ in counts]
        self.outs = [torch.full_like(x, 77) for x in self.rows]
        self.received: list[list[torch.Tensor]] = [[] for _ in counts]

    def dispatch(self, rank: int, one: MoeAlltoAll) -> list[torch.Tensor]:
        payloads = [self.rows[rank], self.ids[rank], self.scales[rank], self.weights[rank]]
        return one.dispatch(self.ids[rank], payloads, self.most, -7, 1)

    def run(self, rank: int, one: MoeAlltoAll, keep: bool = True) -> None:
        found = self.dispatch(rank, one)
        if keep:
            self.received[rank] = [x.clone() for x in found]
        got = one.combine(self.results[rank], self.most, output=self.outs[rank])
        assert got is self.outs[rank]

    def targets(self, rank: int, token: int) -> list[int]:
        """Return the ranks of a token's experts in the order of their first names."""
        names = self.ids[rank][token].tolist()
        return list(dict.fromkeys(x // (self.experts // self.size) for x in names if 0 <= x < self.experts))

    def check_rows(self, old: int) -> None:
        """Check what arrived. Rows that no rank sent have the byte ``old``."""
        for rank in range(self.size):
            rows, ids, scales, weights = self.received[rank]
            for sender in range(self.size):
                for token in range(self.most):
                    at = sender, token
                    if token < len(self.rows[sender]) and rank in self.targets(sender, token):
                        assert torch.equal(rows[at], self.rows[sender][token])
                        assert torch.equal(ids[at], self.ids[sender][token])
                        assert torch.equal(scales[at], self.scales[sender][token])
                        assert torch.equal(weights[at], self.weights[sender][token])
                    else:
                        assert (ids[at] == -7).all()
                        assert all((x[at].reshape(-1).view(torch.uint8) == old).all() for x in (rows, scales, weights))

    def check_sums(self) -> None:
        for rank, out in enumerate(self.outs):
            for token in range(len(out)):
                parts = [self.results[one][rank, token] for one in self.targets(rank, token)]
                exact = torch.zeros(out.shape[1], dtype=torch.float64, device=out.device)
                sums = torch.zeros(out.shape[1], device=out.device)
                for part in parts:
                    exact, sums = exact + part.double(), sums + part.float()
                assert_same_bits(out[token], sums.to(self.dtype))
                torch.testing.assert_close(out[token].double(), exact, rtol=BOUND[self.dtype], atol=BOUND[self.dtype])


def bytes_for(size: int, most: int, top_k: int, hidden: int, dtype: torch.dtype) -> int:
    row = hidden * dtype.itemsize
    return size_per_rank(size, most, row + 4 * top_k + 3 + 4, row)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_sums(dtype, device, make):
    """Every row arrives once, ids of other rows are invalid, and sums have the bits of the order of names."""
    for size in sizes_of(device):
        most, top_k, hidden = random.randint(1, 7), random.randint(1, 5), random.choice([1, 7, 8, 64, 129, 2880])
        experts = size * random.randint(1, 4)
        group = make(size, most, top_k, experts, workspace_size_per_rank=bytes_for(size, most, top_k, hidden, dtype))
        for one in group.workspaces:
            one._region.bytes.fill_(0x5A)
        call = Call(group, most, top_k, experts, hidden, dtype)
        for x in (*call.rows, *call.ids, *call.scales, *call.weights):
            x.clone()  # a first use of a kernel could wait for those of other ranks
        group.run(call.run)
        call.check_rows(0x5A)
        call.check_sums()


def test_calls_in_turns(device, make):
    """Calls of random shapes without a wait between them, through two objects that share their memory."""
    size, most, hidden, experts = 3, 9, 80, 12
    count = 2 * bytes_for(size, most, 4, hidden, torch.float32)
    first = make(size, most, 4, experts, workspace_size_per_rank=count)
    meeting = Meeting(size)
    others = on_threads(
        size,
        lambda rank: MoeAlltoAll(
            Mapping(size, rank, tp_size=size, moe_ep_size=size), most, 2, experts, count, device=device,
            comm_backend=ThreadBackend(meeting, rank),
        ),
    )  # fmt: skip
    for one, other in zip(first.workspaces, others, strict=True):
        assert one._region is other._region
    calls = []
    for _ in range(60):
        top_k, dtype = random.choice([2, 4]), random.choice(DTYPES)
        calls.append(Call(first, random.randint(1, most), top_k, experts, random.randint(1, hidden), dtype))

    def body(rank: int, one: MoeAlltoAll) -> None:
        for number, call in enumerate(calls):
            call.run(rank, one if call.ids[rank].shape[1] == 4 else others[rank], keep=False)
            first.bound_launches(rank, number)

    first.run(body)
    for call in calls:
        call.check_sums()
    for other in others:
        other.destroy()
    again = Call(first, most, 4, experts, hidden, torch.float32)
    first.run(lambda rank, one: again.run(rank, one, keep=False))
    again.check_sums()


def test_results_in_the_received_rows(device, make):
    """The rows that dispatch returned may be the results: a token gets itself once for each rank of its experts."""
    group = make(2, 4, 3, 8, hidden_size=32)
    x = [torch.randn(4, 32, device=device).bfloat16() for _ in range(2)]
    ids = torch.tensor([[0, 7, 1], [1, 2, 3], [9, -1, 8], [4, 4, 4]], dtype=torch.int32, device=device)
    outs = [torch.full_like(one, 77) for one in x]

    def body(rank: int, one: MoeAlltoAll) -> None:
        received = one.dispatch(ids, [x[rank]], 4)
        one.combine(received[0], 4, True, output=outs[rank])

    group.run(body)
    times = torch.tensor([2, 1, 0, 1], device=device).bfloat16()[:, None]
    for rank in range(2):
        assert torch.equal(outs[rank], x[rank] * times)


def test_more_rows_than_a_gpu_holds(device, make):
    """A rank that waits leaves the device to the others: the kernels after its wait start only when it has ended."""
    most, hidden, experts = 3000, 64, 8
    group = make(2, most, 2, experts, hidden_size=hidden)
    x = [torch.randn(most, hidden, device=device).bfloat16() for _ in range(2)]
    ids = [torch.randint(0, experts, (most, 2), device=device).int() for _ in range(2)]
    outs = [torch.full_like(one, 77) for one in x]

    def body(rank: int, one: MoeAlltoAll) -> None:
        for _ in range(2):
            if rank == 1:
                time.sleep(0.1)
            received = one.dispatch(ids[rank], [x[rank]], most)
            if rank == 1:
                time.sleep(0.1)
            one.combine(received[0], most, output=outs[rank])

    group.run(body)
    for rank in range(2):
        targets = ids[rank] // (experts // 2)
        times = 1 + (targets[:, :1] != targets[:, 1:]).to(torch.bfloat16)
        assert torch.equal(outs[rank], x[rank] * times)


def test_no_tokens(device, make):
    """Ranks may have no tokens, also all of them."""
    group = make(2, 4, 2, 8, hidden_size=16)
    ids, x = torch.zeros(0, 2, dtype=torch.int32, device=device), torch.zeros(0, 16, device=device).half()
    some, rows = torch.zeros(2, 2, dtype=torch.int32, device=device), torch.randn(2, 16, device=device).half()
    outs = [torch.full_like(x, 77), torch.full_like(rows, 77)]

    def body(rank: int, one: MoeAlltoAll) -> None:
        (received,) = one.dispatch(ids, [x], 0)
        assert received.shape == (2, 0, 16) and one.combine(received, 0).shape == (0, 16)
        (received,) = one.dispatch(some if rank else ids, [rows if rank else x], 3)
        one.combine(received, 3, output=outs[rank])

    group.run(body)
    assert torch.equal(outs[1], rows)


def test_allocated_results(device, make):
    one = make(1, 4, 1, 4, hidden_size=8).workspaces[0]
    payload = one.get_combine_payload_tensor_in_workspace(3, 8, torch.float16)
    assert payload.shape == (1, 3, 8) and payload.dtype == torch.float16 and payload.device.type == device
    x, ids = torch.randn(2, 8, device=device).half(), torch.zeros(2, 1, dtype=torch.int32, device=device)
    payload.copy_(one.dispatch(ids, [x], 3)[0])
    assert torch.equal(one.combine(payload, 3, payload_in_workspace=True), x)
    with pytest.raises(TypeError, match="dtype: got torch.int8, wanted float32, float16 or bfloat16"):
        one.get_combine_payload_tensor_in_workspace(3, 8, torch.int8)


def test_a_compiled_caller(device, make, cold_dynamo):
    """Calls are not traced: their caller runs in pieces, or fails as one graph."""
    one = make(1, 4, 1, 4, hidden_size=8).workspaces[0]
    x, ids = torch.randn(3, 8, device=device), torch.zeros(3, 1, dtype=torch.int32, device=device)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return one.combine(one.dispatch(ids, [x * 2], 3)[0] * 2, 3) * 2

    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), x * 8)
    torch.compiler.reset()
    with pytest.raises(Exception, match="cannot be traced"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


def test_graphs_replay(device, make):
    """A graph of both calls reads new tokens and ids at each replay."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    group = make(2, 8, 2, 16, hidden_size=64)
    call = Call(group, 8, 2, 16, 64, torch.bfloat16)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=group.streams[rank]):
            call.run(rank, group.workspaces[rank], keep=False)
    for _ in range(3):
        for ids, results in zip(call.ids, call.results, strict=True):
            ids.copy_(torch.randint(-2, 18, ids.shape))
            results.normal_()

        def body(rank: int, _: Any) -> None:
            for number in range(200):
                graphs[rank].replay()
                group.bound_launches(rank, number)

        group.run(body)
        call.check_sums()


# Faults


@pytest.mark.parametrize("late", ["dispatch", "combine"])
def test_a_rank_that_does_not_arrive(late, device, make, monkeypatch):
    """The others raise within the bound, naming it and the function. Sums are NaN, and later objects work."""
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "2")
    group = make(3, 4, 2, 12)
    call = Call(group, 4, 2, 12, 8, torch.float32)

    def body(rank: int, one: MoeAlltoAll) -> None:
        if rank == 2 and late == "combine":
            call.dispatch(rank, one)
        if rank != 2:
            call.run(rank, one, keep=False)

    began = time.monotonic()
    outcomes = group.outcomes(body)
    assert 2 <= time.monotonic() - began < 50 and outcomes[2] is None
    number = 0 if late == "dispatch" else 1
    for rank, one in enumerate(outcomes[:2]):
        assert isinstance(one, GroupError) and one.ranks == (2,)
        assert str(one) == f"MoeAlltoAll.{late}: rank 2 did not arrive within 2 s in call {number}"
        if late == "combine" or device == "cuda":
            assert call.outs[rank].isnan().all()
    again = make(2, 4, 2, 12)
    after = Call(again, 4, 2, 12, 8, torch.float32)
    again.run(lambda rank, one: after.run(rank, one, keep=False))
    after.check_sums()


def test_a_call_too_many_on_one_rank(device, make, monkeypatch):
    """It ends within its bound, and the other rank's results are right."""
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "2")
    group = make(2, 4, 2, 8)
    call, more = (Call(group, 4, 2, 8, 8, torch.float32) for _ in range(2))

    def body(rank: int, one: MoeAlltoAll) -> None:
        call.run(rank, one, keep=False)
        if rank == 1:
            more.dispatch(rank, one)

    first, second = group.outcomes(body)
    assert first is None and str(second) == "MoeAlltoAll.dispatch: rank 0 did not arrive within 2 s in call 2"
    call.check_sums()


def test_two_streams_at_once(device, make):
    """A call whose number changes while it waits shares the memory with another."""
    group = make(2, 4, 1, 4)
    x, ids = torch.ones(2, 8, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)
    state = group.workspaces[0]._region._state
    number, side = torch.ones_like(state), torch.cuda.Stream() if device == "cuda" else None

    def body(rank: int, one: MoeAlltoAll) -> None:
        if rank == 1:
            time.sleep(0.5)
            with torch.cuda.stream(side):  # changes nothing on the CPU
                state[:EPOCH_WORDS].copy_(number[:EPOCH_WORDS])
            time.sleep(0.1)
        one.dispatch(ids, [x], 4)

    first, second = group.outcomes(body)
    assert str(first) == "MoeAlltoAll.dispatch: two streams used the workspace at once in call 0" and second is None


def test_another_call_on_one_rank(device, make):
    """Both ranks raise at once, naming both calls."""
    x, ids = torch.ones(2, 8, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)
    left, right = x[:, :2].contiguous(), x[:, :6].contiguous()
    for ours, theirs, text, other in (
        ((ids, [x], 4), (ids, [x], 5), "4 rows of 32 bytes", "5 rows of 32 bytes"),
        ((ids, [x], 4), (ids, [right], 4), "of 32 bytes", "of 24 bytes"),
        ((ids, [x], 4), (ids, [left, right], 4), "1 payloads of layout", "2 payloads of layout"),
        ((ids, [left, right], 4), (ids, [right, left], 4), "2 payloads of layout", "2 payloads of layout"),
        ((ids, [x, ids], 4), (ids, [x, ids], 4, -1, 1), "2 payloads of layout", ", ids in number 1"),
    ):
        group, calls = make(2, 8, 1, 4), (ours, theirs)
        began = time.monotonic()

        def body(rank: int, one: MoeAlltoAll, calls: Any = calls) -> None:
            one.dispatch(*calls[rank])

        outcomes = group.outcomes(body)
        assert time.monotonic() - began < 50, f"a rank waited for its time-out: {outcomes}"
        for rank, one in enumerate(outcomes):
            assert isinstance(one, GroupError) and one.ranks == (1 - rank, rank)
            assert text in str(one) and other in str(one) and "bytes, MoeAlltoAll.dispatch" in str(one), one
            first, second = str(one).split(f", rank {rank} with ")
            assert first.partition(" with ")[2] != second, "the text shows no difference"


def test_abort(device, make):
    group = make(2, 4, 1, 4)
    x, ids = torch.ones(2, 8, device=device), torch.zeros(2, 1, dtype=torch.int32, device=device)

    def body(rank: int, one: MoeAlltoAll) -> None:
        if rank == 0:
            one.dispatch(ids, [x], 4)
        else:
            time.sleep(0.5)
            group.workspaces[0].abort()

    began = time.monotonic()
    error = group.outcomes(body)[0]
    assert isinstance(error, GroupError) and time.monotonic() - began < 50
    assert str(error) == "MoeAlltoAll.dispatch: aborted in call 0 while it waited for rank 1"
    assert not group.workspaces[0]._region.is_usable(), "a later object would share it"


# Set-up and arguments


def made_by(size: int, device: str, change: Callable[[int], dict[str, Any]]) -> list[Any]:
    """Return the objects of ranks that differ, or their errors."""
    meeting = Meeting(size)

    def create(rank: int) -> MoeAlltoAll:
        mapping = Mapping(size, rank, tp_size=size, moe_ep_size=size)
        given = dict(mapping=mapping, max_num_tokens=4, top_k=2, num_experts=8, hidden_size=16, device=device)
        config = MnnvlConfig(comm_backend=ThreadBackend(meeting, rank))
        return MoeAlltoAll(**{**given, "mnnvl_config": config, **change(rank)})

    return on_threads(size, create)


def test_ranks_that_disagree(device):
    for change, text in (
        (lambda rank: {"hidden_size": 16 + 64 * rank}, "MoeAlltoAll: bytes: got"),
        (lambda rank: {"num_experts": 8 + 8 * rank}, r"sizes: got \(4, 16\) on rank 1, wanted \(4, 8\)"),
        (lambda rank: {"num_experts": 9}, "num_experts: got 9, wanted a multiple of the 2 ranks"),
        (lambda rank: {"top_k": rank}, "top_k: got 0, wanted a positive number"),
        (lambda rank: {"workspace_size_per_rank": 0}, "workspace_size_per_rank: got 0, wanted a positive number"),
        (lambda rank: {"hidden_size": None}, "hidden_size: got None, wanted a number, or workspace_size_per_rank"),
        (lambda rank: {"mapping": Mapping(2, 0, tp_size=2, moe_ep_size=2)}, "mapping: got rank 0 of 2, wanted rank 1"),
    ):
        for one in made_by(2, device, change):
            assert isinstance(one, ValueError)
            with pytest.raises(ValueError, match=text):
                raise one


def test_shared_memory_of_objects(device):
    """Objects of one group share memory of equal sizes. The last one releases it."""
    first = made_by(2, device, lambda rank: {})
    second = made_by(2, device, lambda rank: {"top_k": 1, "mnnvl_config": MnnvlConfig(), "comm_backend": None})
    assert all(isinstance(one, ValueError) for one in second), "there is no group without torch.distributed"
    larger = made_by(2, device, lambda rank: {"hidden_size": 512})
    assert larger[0]._region is not first[0]._region and larger[0]._region.name == larger[1]._region.name
    third = made_by(2, device, lambda rank: {})
    assert [one._region for one in third] == [one._region for one in first]
    ids, x = torch.zeros(1, 2, dtype=torch.int32, device=device), torch.ones(1, 16, device=device)
    on_threads(2, lambda rank: first[rank].dispatch(ids, [x], 1))
    with pytest.raises(ValueError, match="workspace: got a dispatch of another object, wanted combine"):
        third[0].combine(torch.ones(2, 1, 16, device=device), 1)
    on_threads(2, lambda rank: first[rank].combine(torch.ones(2, 1, 16, device=device), 1))
    for one in (*first, *larger, *third):
        region, users = one._region, one._region.users
        one.destroy(), one.destroy()
        assert region.users == users - 1 and region._is_alive() == (users > 1)


def test_sizes():
    """The two functions of sizes agree. FlashInfer has both names."""
    rows = MoeAlltoAll.get_moe_workspace_size_per_rank(4, 8, 100, 64, extra_payload_bytes_per_token=4)
    assert rows == size_per_rank(4, 100, 128 + 64 + 4, 128)


def test_set_up_in_a_capture(device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(CaptureError, match="MoeAlltoAll: a CUDA graph"):
        MoeAlltoAll(Mapping(), 4, 2, 8, hidden_size=16, device=device)


def test_mapping():
    assert (Mapping().moe_ep_size, Mapping().moe_ep_rank) == (1, 0)
    one = Mapping(world_size=8, rank=6, gpus_per_node=8, tp_size=4, pp_size=2, moe_ep_size=2)
    assert (one.moe_tp_size, one.moe_ep_size, one.moe_ep_rank) == (2, 2, 0)
    assert Mapping(8, 5, tp_size=8, moe_tp_size=1).moe_ep_rank == 5
    with pytest.raises(ValueError, match="Mapping: moe_tp_size x moe_ep_size: got 2 x 3, wanted 8 as tp_size"):
        Mapping(8, 5, tp_size=8, moe_tp_size=2, moe_ep_size=3)


def test_invalid_arguments(device, make):
    one = make(1, 4, 2, 8, hidden_size=16).workspaces[0]
    before = int(one._region._state[0])
    one._region.bytes.fill_(0x5A)
    ids, x = torch.zeros(3, 2, dtype=torch.int32, device=device), torch.ones(3, 16, device=device).half()
    long = torch.ones(3, 4096, device=device)
    for kind, text, given in (
        (ValueError, "runtime_max_tokens_per_rank: got 2, wanted 3 to 4", (ids, [x], 2)),
        (ValueError, "runtime_max_tokens_per_rank: got 5, wanted 3 to 4", (ids, [x], 5)),
        (ValueError, "token_selected_experts: got 1 dimensions, wanted 2", (ids[:, 0], [x], 4)),
        (ValueError, "token_selected_experts: got 1 columns, wanted 2 as top_k", (ids[:, :1], [x], 4)),
        (ValueError, "token_selected_experts: is not contiguous", (ids.T.contiguous().T, [x], 4)),
        (TypeError, "token_selected_experts: got int64, wanted int32", (ids.long(), [x], 4)),
        (ValueError, "input_payloads: got 0 tensors, wanted 1 to 6", (ids, [], 4)),
        (ValueError, "input_payloads: got 7 tensors, wanted 1 to 6", (ids, [x] * (MAX_PAYLOADS + 1), 4)),
        (ValueError, r"input_payloads: got shape \[2, 16\], wanted 3 rows", (ids, [x[:2]], 4)),
        (ValueError, "input_payloads: got a tensor that is not contiguous", (ids, [x.T.contiguous().T], 4)),
        (TypeError, "input_payloads: got int, wanted Tensor", (ids, [3], 4)),
        (ValueError, "workspace_size_per_rank: got .* bytes with 0 of the other function", (ids, [long], 4)),
        (ValueError, "invalid_token_expert_id: got -1 with None, wanted both", (ids, [x], 4, -1)),
        (ValueError, "expert_id_payload_index: got 1, wanted 0 to 0", (ids, [x], 4, -1, 1)),
        (TypeError, r"input_payloads\[0\]: got torch.float16, wanted int32", (ids, [x], 4, -1, 0)),
        (GradientError, "has no gradient", (ids, [x.clone().requires_grad_()], 4)),
    ):
        with pytest.raises(kind, match=f"^MoeAlltoAll.dispatch: {text}"):
            one.dispatch(*given)
    with pytest.raises(ValueError, match="^MoeAlltoAll.combine: workspace: got no dispatch, wanted dispatch()"):
        one.combine(x[None], 3)
    assert int(one._region._state[0]) == before and (one._region.bytes == 0x5A).all(), "a kernel ran"
    received = one.dispatch(ids, [x], 3)[0]
    with pytest.raises(ValueError, match="^MoeAlltoAll.dispatch: workspace: got a second dispatch, wanted combine()"):
        one.dispatch(ids, [x], 3)
    out = torch.full((3, 16), 77.0, device=device).half()
    for kind, text, given, to in (
        (ValueError, "payload: got 2 dimensions, wanted 3", (x, 3), None),
        (ValueError, "runtime_max_tokens_per_rank: got 4 with a payload of 3, wanted 3", (received, 4), None),
        (ValueError, "payload: got 2 parts, wanted those of 1 ranks", (received.repeat(2, 1, 1), 3), None),
        (ValueError, "payload: is not contiguous", (received.mT.contiguous().mT, 3), None),
        (TypeError, "payload: got float64, wanted float32", (received.double(), 3), None),
        (TypeError, "output: got float16, wanted float32 as payload has", (received.float(), 3), out),
        (ValueError, r"output: got shape \[2, 16\], wanted \[3, 16\]", (received, 3), out[:2]),
        (ValueError, r"output: got shape \[3, 8\], wanted \[any, 16\]", (received, 3), out[:, :8].contiguous()),
        (ValueError, "output: overlaps the memory of payload", (received, 3), received[0]),
        (ValueError, "workspace_size_per_rank: got .* of the other function", (long[None], 3), None),
        (GradientError, "", (received.clone().requires_grad_(), 3), None),
    ):
        with pytest.raises(kind, match=f"MoeAlltoAll.combine: {text}" if text else "has no gradient"):
            one.combine(*given, output=to)
    assert (out == 77).all(), "something was written"
    assert torch.equal(one.combine(received, 3), x)
    one.destroy()
    for name, call in (("dispatch", lambda: one.dispatch(ids, [x], 3)), ("check", one.check), ("abort", one.abort)):
        with pytest.raises(ValueError, match=rf"^MoeAlltoAll.{name}: workspace: got one after destroy\(\)"):
            call()
