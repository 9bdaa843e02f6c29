"""Workspaces: set-up that all ranks agree on, faults that end in errors, and what is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer.comm import _memory
from flashinfer.comm import allreduce as allreduce_module
from flashinfer.comm import workspace as module
from flashinfer.comm.allreduce import allreduce_fusion
from flashinfer.comm.mnnvl import CommBackend
from flashinfer.comm.trtllm_ar import AllReduceFusionPattern as Pattern
from flashinfer.comm.workspace import (
    EPOCH_WORDS,
    MNNVLAllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    create_allreduce_fusion_workspace,
)
from flashinfer.errors import CaptureError, GroupError, UnsupportedError

from ..support.processes import until
from .ranks import Group, Meeting, ThreadBackend, on_threads

SUM, NORM = Pattern.kAllReduce, Pattern.kARResidualRMSNorm
FP32 = torch.float32


def adds_up(group: Group) -> None:
    """Check that a call of a group works."""
    x = torch.ones(2, 64, device=group.device)
    out = [torch.zeros_like(x) for _ in range(group.size)]
    group.run(lambda rank, workspace: allreduce_fusion(x, workspace, SUM, output=out[rank]))
    assert all((one == group.size).all() for one in out)


def until_it_waits(group: Group) -> None:
    """Wait until rank 0 has begun call 0: its header, the first word of rank 1's memory, is no longer empty.

    On a GPU, a read of that memory would wait for rank 0's kernel.
    """
    if group.device == "cuda":
        time.sleep(0.3)
        return
    memory = group.workspaces[1]._memory
    until(lambda: memory.read(memory.addresses[1], 4) != b"\xff" * 4)


def errors(outcomes: list[Any]) -> list[GroupError]:
    """Return the errors of all ranks, each a ``GroupError``."""
    assert all(isinstance(one, GroupError) for one in outcomes), outcomes
    return outcomes


# Faults of calls. After each, the device works on, and so does a new workspace.


@pytest.mark.parametrize("shots", [1, 2])
def test_a_rank_that_does_not_arrive(shots, device, make_group, monkeypatch):
    """The others raise within the bound, naming it. The device works on, and so does a new workspace.

    In two shots a rank that waits for another's sum names the one that this sum lacks.
    """
    monkeypatch.setattr(allreduce_module, "_SHOTS", shots)
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "2")
    group = make_group(3, 2, 64, FP32)
    adds_up(group)
    x, out = torch.ones(2, 64, device=device), [torch.zeros(2, 64, device=device) for _ in range(3)]
    began = time.monotonic()
    outcomes = group.outcomes(
        lambda rank, workspace: rank == 2 or allreduce_fusion(x, workspace, SUM, output=out[rank])
    )
    assert 2 <= time.monotonic() - began < 50  # a bound of 2 s, on a busy machine
    for rank, one in enumerate(errors(outcomes[:2])):
        assert str(one) == "allreduce_fusion: rank 2 did not arrive within 2 s in call 1" and one.ranks == (2,)
        assert out[rank].isnan().all(), "a part is missing"
    before = group.workspaces[0]._state.clone()
    for _ in range(2):
        with pytest.raises(GroupError, match="rank 2 did not arrive"):
            allreduce_fusion(x, group.workspaces[0], SUM)
    assert torch.equal(before, group.workspaces[0]._state), "a failed workspace launched a kernel"
    adds_up(make_group(2, 2, 64, FP32))


def test_a_call_too_many_on_one_rank(device, make_group, monkeypatch):
    """It ends within its bound, and the other rank's results are right."""
    monkeypatch.setenv("FLASHINFER_COMM_TIMEOUT", "2")
    group = make_group(2, 2, 64, FP32)
    x, out = torch.ones(2, 64, device=device), [torch.zeros(2, 64, device=device) for _ in range(2)]

    def body(rank: int, workspace: Any) -> None:
        for _ in range(3 + rank):
            allreduce_fusion(x, workspace, SUM, output=out[rank])

    first, second = group.outcomes(body)
    assert first is None and (out[0] == 2).all()
    assert str(second) == "allreduce_fusion: rank 0 did not arrive within 2 s in call 3"
    adds_up(make_group(2, 2, 64, FP32))


OTHER_CALLS = {
    "rows": (lambda x: x[:1], SUM, "2 rows of 256 bytes, float32, the sum only", "1 rows of 256 bytes"),
    "hidden": (lambda x: x[:, :8].contiguous(), SUM, "2 rows of 256 bytes", "2 rows of 32 bytes"),
    "no rows": (lambda x: x[:0], SUM, "2 rows of 256 bytes", "0 rows of 256 bytes"),
    "dtype": (lambda x: x.view(torch.float16).contiguous()[:, :64].bfloat16(), SUM, "float32", "bfloat16"),
    "pattern": (lambda x: x, NORM, "the sum only", "residual and norm"),
}


@pytest.mark.parametrize("what", OTHER_CALLS)
def test_another_call_on_one_rank(what, device, make_group):
    """Both ranks raise at once, naming both calls."""
    change, pattern, ours, theirs = OTHER_CALLS[what]
    group = make_group(2, 2, 64, FP32)
    x = torch.ones(2, 64, device=device)
    other, weight = change(x), torch.ones(64, device=device)
    if other.dtype != FP32:
        make_group(2, 2, 64, other.dtype)  # loads its kernels: a load could wait for rank 0's kernel
    began = time.monotonic()

    def body(rank: int, workspace: Any) -> None:
        if rank == 0:
            allreduce_fusion(x, workspace, SUM)
        else:
            given = dict(residual_in=x, rms_gamma=weight) if pattern == NORM else {}
            allreduce_fusion(other, workspace, pattern, **given)

    for rank, one in enumerate(errors(group.outcomes(body))):
        assert f"rank {1 - rank} made call 0 with" in str(one) and ours in str(one) and theirs in str(one)
        assert one.ranks == (1 - rank, rank)
    assert time.monotonic() - began < 50, "a rank waited for its time-out"
    adds_up(make_group(2, 2, 64, FP32))


def test_abort_ends_a_wait(device, make_group):
    group = make_group(2, 2, 64, FP32)
    x = torch.ones(2, 64, device=device)

    def body(rank: int, workspace: Any) -> None:
        if rank == 0:
            allreduce_fusion(x, workspace, SUM)
        else:
            until_it_waits(group)
            group.workspaces[0].abort()

    (error,) = errors(group.outcomes(body)[:1])
    assert str(error) == "allreduce_fusion: aborted in call 0 while it waited for rank 1"
    with pytest.raises(GroupError, match="aborted"):
        group.workspaces[0].check()
    adds_up(make_group(2, 2, 64, FP32))


def test_abort_before_a_call(device, make_group):
    group = make_group(2, 2, 64, FP32)
    group.workspaces[1].abort()
    with pytest.raises(GroupError, match="^allreduce_fusion: aborted$"):
        allreduce_fusion(torch.ones(2, 64, device=device), group.workspaces[1], SUM)


def test_two_streams_at_once(device, make_group):
    """A call whose number changes while it waits shares the workspace with another."""
    group = make_group(2, 2, 64, FP32)
    x = torch.ones(2, 64, device=device)
    number = torch.ones_like(group.workspaces[0]._state)
    side = torch.cuda.Stream() if device == "cuda" else None

    def body(rank: int, workspace: Any) -> None:
        if rank == 0:
            allreduce_fusion(x, workspace, SUM)
        else:
            until_it_waits(group)
            with torch.cuda.stream(side):  # changes nothing on the CPU
                group.workspaces[0]._state[:EPOCH_WORDS].copy_(number[:EPOCH_WORDS])
            time.sleep(0.1)
            allreduce_fusion(x, workspace, SUM)

    first, second = group.outcomes(body)
    assert isinstance(first, GroupError) and second is None
    assert str(first) == "allreduce_fusion: two streams used the workspace at once in call 0"
    adds_up(make_group(2, 2, 64, FP32))


# Set-up


@pytest.fixture
def nothing_left() -> Any:
    """Check that a test leaves no descriptor and no mapping of shared memory."""

    def count() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_bytes().count(b"flashinfer-comm")

    for index in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{index}")  # a context has descriptors
    before = count()
    yield
    assert count() == before


def make(size: int, change: Any = lambda rank: {}, device: str = "cpu", **options: Any) -> list[Any]:
    """Return workspaces or errors of a group, with arguments that a rank changes."""
    meeting = Meeting(size)

    def call(rank: int) -> Any:
        arguments: dict[str, Any] = dict(
            tp_size=size, tp_rank=rank, max_token_num=4, hidden_dim=64, dtype=FP32,
            comm_backend=ThreadBackend(meeting, rank), device=device,
        )  # fmt: skip
        return TRTLLMAllReduceFusionWorkspace(**{**arguments, **options, **change(rank)})

    return on_threads(size, call)


def assert_all_raise(made: list[Any], kind: type[Exception], text: str) -> None:
    assert {type(one) for one in made} == {kind}, made
    assert len({str(one) for one in made}) == 1 and text in str(made[0]), made[0]


def test_ranks_that_disagree(device, nothing_left):
    for change, kind, text in (
        (dict(max_token_num=5), ValueError, "got 1280 on rank 1, wanted 1024 as rank 0 has"),
        (dict(dtype=torch.int8), TypeError, "dtype: got torch.int8"),
        (dict(hidden_dim=0), ValueError, "max_token_num: got 4 x 0"),
        (dict(tp_rank=2), ValueError, "tp_rank: got rank 2 of 3, wanted rank 1 of 3"),
        (dict(tp_size=17), ValueError, "tp_size: got 17, wanted 1 to 16"),
        (dict(device="cpu" if device == "cuda" else "meta"), ValueError, "device: got "),
    ):
        made = make(3, lambda rank, change=change: change if rank == 1 else {}, device)
        assert_all_raise(made, kind, text)


def test_ranks_of_several_hosts(device, nothing_left, monkeypatch):
    other = threading.local()
    monkeypatch.setattr(module, "_host", lambda: getattr(other, "name", "a"))

    def change(rank: int) -> dict[str, Any]:
        if rank == 1:
            other.name = "b"
        return {}

    assert_all_raise(make(2, change, device), UnsupportedError, "rank 1 is on another host than rank 0")


@pytest.mark.parametrize("step", ["posix_fallocate", "recv_fds", "mmap"])
def test_a_step_that_fails_on_one_rank(step, nothing_left, monkeypatch):
    """No memory, or a refused descriptor: all ranks raise, and nothing is left."""
    owner = {"posix_fallocate": os, "recv_fds": _memory.socket, "mmap": _memory.mmap}[step]
    original, failing = getattr(owner, step), threading.local()

    def fail(*arguments: Any) -> Any:
        if getattr(failing, "here", False):
            raise OSError(28, f"{step} failed")
        return original(*arguments)

    monkeypatch.setattr(owner, step, fail)

    def change(rank: int) -> dict[str, Any]:
        failing.here = rank == 2
        return {}

    assert_all_raise(make(3, change), OSError, f"{step} failed")
    failing.here = False
    for one in make(2):
        one.destroy()


def test_a_gpu_without_memory(device, monkeypatch):
    """No memory on one rank: all ranks raise both reasons, and the device works on."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    original, failing = _memory.Library.address, threading.local()

    def fail(self: Any, name: str, *arguments: Any) -> int:
        if name in ("create", "ipc_create") and getattr(failing, "here", False):
            raise RuntimeError(f"{name}: out of memory")
        return original(self, name, *arguments)

    monkeypatch.setattr(_memory.Library, "address", fail)

    def change(rank: int) -> dict[str, Any]:
        failing.here = rank == 1
        return {}

    assert_all_raise(
        make(3, change, device), RuntimeError, "by descriptors: create: out of memory; by cudaIpc: ipc_create"
    )
    failing.here = False
    for one in make(2, device=device):
        one.destroy()


def test_memory_that_does_not_arrive(nothing_left, monkeypatch):
    """Each rank maps memory, but not that of its peers."""
    monkeypatch.setattr(_memory, "exchange_descriptors", lambda own, exchange, undo: [own] * exchange.size)
    made = make(2)
    assert {type(one) for one in made} == {GroupError}
    assert "rank 0 does not see the bytes that rank 0 writes" in str(made[0]) or "rank 1" in str(made[0])


def test_a_connection_of_another_user(nothing_left, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert_all_raise(make(2), OSError, "wanted one of user 12345")


def test_descriptors_that_are_refused_on_a_gpu(device, monkeypatch):
    """Memory then travels as handles of cudaIpc, which one process cannot open: both reasons are in the error."""
    if device != "cuda":
        pytest.skip("needs a GPU")

    def refuse(*_: Any) -> None:
        raise OSError("no descriptors here")

    monkeypatch.setattr(_memory, "exchange_descriptors", refuse)
    made = make(2, device=device)
    assert {type(one) for one in made} == {RuntimeError}
    assert "by descriptors: no descriptors here; by cudaIpc: cudaIpcOpenMemHandle" in str(made[0])


def test_gpu_memory_is_released(device, monkeypatch):
    """By destroy(), and by a set-up that fails after its allocations."""
    if device != "cuda":
        pytest.skip("needs a GPU")

    def refuse(*_: Any) -> None:
        raise OSError("no descriptors here")

    # More than the GPU has, in sum. Free memory is no measure, since other processes use the GPU too.
    for turn in range(torch.cuda.mem_get_info()[1] >> 30):
        failing = turn % 2 == 1
        with monkeypatch.context() as change:
            if failing:
                change.setattr(_memory, "exchange_descriptors", refuse)
            for one in make(2, device=device, max_token_num=1 << 21):  # 1 GiB for each rank
                assert isinstance(one, RuntimeError) if failing else one.destroy() is None, one


def test_set_up_in_a_capture(device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(CaptureError, match="a CUDA graph is being captured"):
        TRTLLMAllReduceFusionWorkspace(1, 0, 4, 64, FP32, device=device)


def test_sizes(device):
    for one in make(2, device=device, hidden_dim=60, dtype=torch.float16):  # padded to 128 bytes
        fits = one.is_buffer_size_sufficient
        assert fits(2, 4, 64, torch.float16) and fits(2, 64, 1, torch.float32, use_oneshot=True) is False
        assert fits(2, 32, 8, torch.float16, use_oneshot=False) and not fits(2, 33, 8, torch.float16)
        assert not fits(3, 1, 1, torch.float16) and fits(2, 0, 64, torch.float16)
        assert one.backend == "trtllm" and one.world_size == 2
        assert one.metadata["tp_size"] == 2 and one.metadata["hidden_dim"] == 60
        assert one.metadata["use_fp32_lamport"] is False
        for method in (one.checkpoint_prepare, one.checkpoint_restore):
            with pytest.raises(NotImplementedError, match="cannot unmap"):
                method()
        one.destroy()
        assert not fits(2, 1, 1, torch.float16)


# Ends


def test_destroy(device, make_group, nothing_left):
    """A destroyed workspace raises. Its memory stays for peers that still write to it."""
    group = make_group(2, 2, 64, FP32)
    adds_up(group)
    x = torch.ones(2, 64, device=device)
    for _ in range(2):
        group.workspaces[0].destroy()
    with pytest.raises(ValueError, match="workspace: got one after destroy"):
        allreduce_fusion(x, group.workspaces[0], SUM)
    group.workspaces[1]._table[6] = 200_000_000
    (_, error) = group.outcomes(lambda rank, workspace: rank == 0 or allreduce_fusion(x, workspace, SUM))
    assert isinstance(error, GroupError) and error.ranks == (0,)
    with pytest.warns(RuntimeWarning, match="destroyed after an error: allreduce_fusion: rank 0 did not arrive"):
        group.workspaces[1].destroy()


def test_a_forgotten_workspace(nothing_left):
    made = make(2)
    with pytest.warns(ResourceWarning, match="a workspace was not destroyed"):
        while made:
            made.pop()
            gc.collect()


def test_a_forked_child_leaves_it_alone(make_group, device):
    if device != "cpu":
        pytest.skip("a forked child cannot use a GPU")
    group = make_group(2, 2, 64, FP32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        for one in group.workspaces:
            one.destroy()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    adds_up(group)


# The function that engines call


def test_create(device):
    create = create_allreduce_fusion_workspace
    for backend in ("auto", "trtllm"):
        one = create(backend, 1, 0, 8, 64, torch.bfloat16, device=device, gpus_per_node=8, force_oneshot_support=True)
        x = torch.randn(8, 64, device=device).bfloat16()
        assert torch.equal(allreduce_fusion(x, one, SUM), x)
        one.destroy()
    for backend in ("mnnvl", "mnnvl-cutedsl"):
        with pytest.raises(ValueError, match=f"backend: got '{backend}', which needs NVLink multicast"):
            create(backend, 1, 0, 8, 64, torch.bfloat16)
    with pytest.raises(RuntimeError, match="backend: got 'other', wanted 'auto' or 'trtllm'"):
        create("other", 1, 0, 8, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="hidden_dim: got None, wanted a value"):
        create("auto", 1, 0, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="num_ctas: got an option of backend 'mnnvl-cutedsl'"):
        create("auto", 1, 0, 8, 64, torch.bfloat16, num_ctas=4)
    with pytest.raises(UnsupportedError, match="needs NVLink multicast"):
        MNNVLAllReduceFusionWorkspace(None, max_num_tokens=4)
    with pytest.raises(ValueError, match="group: got none, and torch.distributed is not initialised"):
        create("auto", 2, 0, 8, 64, torch.bfloat16)


def test_create_under_a_default_device(device):
    """Engines create workspaces under ``with torch.device("cuda")``."""
    with torch.device("meta" if device == "cpu" else device):
        one = create_allreduce_fusion_workspace("auto", 1, 0, 8, 64, torch.bfloat16, device=device)
        x = torch.randn(8, 64, device=device).bfloat16()
        assert torch.equal(allreduce_fusion(x, one, SUM), x)
        one.destroy()


def test_a_backend_of_an_engine(device):
    """Its own bcast and barrier are optional."""
    meeting = Meeting(2)

    class Own(ThreadBackend):
        pass

    results = on_threads(2, lambda rank: (Own(meeting, rank).bcast(rank + 5, 1), Own(meeting, rank).barrier()))
    assert results == [(6, None), (6, None)] and issubclass(Own, CommBackend)
