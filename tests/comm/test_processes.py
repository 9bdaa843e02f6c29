"""Ranks that are processes: four on the CPU over gloo, and two on two GPUs."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import torch

from ..support.processes import end, start

# Ranks are forked, so that torch is imported once. Each prints one line of JSON for each step.
RANKS = """
    import faulthandler, json, os, signal, sys, threading, time, warnings
    import torch
    import torch.distributed as dist
    from flashinfer.comm import _trtllm, _vllm, allreduce, cuda_ipc
    from flashinfer.comm.allreduce import allreduce_fusion
    from flashinfer.comm.alltoall import MoeAlltoAll
    from flashinfer.comm.mapping import Mapping
    from flashinfer.comm.mnnvl import TorchDistBackend
    from flashinfer.comm.shares import all_gather, reduce_scatter
    from flashinfer.comm.workspace import create_allreduce_fusion_workspace
    from flashinfer.errors import GroupError
    torch.set_num_threads(1)
    size, backend, steps = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    reader, writer = os.pipe()
    if (keeper := os.fork()) == 0:  # of the store: what forks ranks has no threads
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(server.port).encode())
        time.sleep(600)
    port, ranks = int(os.read(reader, 16)), []
    for rank in range(size):
        if child := os.fork():
            ranks.append(child)
            continue
        faulthandler.dump_traceback_later(380, exit=True)
        device = f"cuda:{rank}" if backend == "nccl" else "cpu"
        if backend == "nccl":
            torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
        torch.manual_seed(5)

        def make(group=None, tokens=64, hidden=512, dtype=torch.bfloat16):
            number, count = dist.get_rank(group), dist.get_world_size(group)
            return create_allreduce_fusion_workspace("auto", count, number, tokens, hidden, dtype, group=group, device=device)

        def drawn(tokens, hidden, count=size, dtype=torch.bfloat16):
            return [torch.randn(tokens, hidden).to(dtype).to(device) for _ in range(count)]

        def total(parts):
            result = parts[0].float()
            for one in parts[1:]:
                result = result + one.float()
            return result.to(parts[0].dtype)

        memory = {}
        for step, code in steps.items():
            said = {"rank": rank, "step": step}
            began = time.monotonic()
            try:
                exec(code)
            except (GroupError, ValueError, OSError) as err:
                said |= {"error": type(err).__name__, "text": str(err), "ranks": getattr(err, "ranks", None)}
            said["seconds"] = time.monotonic() - began
            os.write(1, (json.dumps(said) + "\\n").encode())
        os._exit(0)
    for rank, child in enumerate(ranks):
        print("ended", rank, os.waitpid(child, 0)[1], flush=True)
    os.kill(keeper, signal.SIGKILL)
"""
MAKE = "memory['one'] = make()"
# Calls of random shapes, which all ranks draw alike, with the bits of the sum in the order of ranks.
CALLS = """
one = memory["one"]
for number in range(150):
    tokens, hidden = int(torch.randint(0, 65, ())), int(torch.randint(1, 65, ())) * 8
    parts = drawn(tokens, hidden)
    residual, weight = drawn(tokens, hidden, 1)[0], drawn(1, hidden, 1)[0][0]
    want = total(parts)
    if number % 2:
        got = allreduce_fusion(parts[rank], one, 0, True)
    else:
        want = (want.float() + residual.float()).bfloat16()
        got = torch.full_like(parts[0], 7)
        norm = allreduce_fusion(parts[rank], one, 1, residual_in=residual, residual_out=got, rms_gamma=weight)
        norms = memory.setdefault("backend", TorchDistBackend()).allgather(norm.cpu()) if number % 10 == 0 else [norm.cpu()]
        assert all(torch.equal(x, norm.cpu()) for x in norms)
    assert torch.equal(got, want), (number, tokens, hidden)
one.check()
said["way"] = one._memory.mechanism
"""
SHARES = """
one = memory["one"]
for number in range(60):
    rows, hidden = int(torch.randint(0, 64 // size + 1, ())), int(torch.randint(1, 513, ()))
    parts = drawn(rows * size, hidden)
    share = reduce_scatter(parts[rank], one)
    assert torch.equal(share, total(parts)[rank * rows : (rank + 1) * rows]), (number, rows, hidden)
    assert torch.equal(all_gather(share, one), total(parts)), (number, rows, hidden)
one.check()
"""
# Calls that do not fit a GPU's multiprocessors at once, between small ones, with a late rank, and in graphs.
LARGE = """
many, hidden = (600, 8192) if device != "cpu" else (20, 512)
one, weight = make(tokens=many, hidden=hidden), drawn(1, hidden, 1)[0][0]

def call(x, residual):
    out = torch.full_like(x, 7)
    norm = allreduce_fusion(
        x, one, 1, True, residual_in=residual, residual_out=out, rms_gamma=weight[: x.shape[1]]
    )
    rows = x.shape[0] // size * size
    share = reduce_scatter(x[:rows], one, None, True)
    return allreduce_fusion(x, one, 0, True), out, norm, all_gather(share, one, None, True)

inputs = []
for number, tokens in enumerate((many, 1, many - 1, size, many)):
    columns = hidden if number % 2 else hidden * 7 // 8
    parts, residual = drawn(tokens, columns), drawn(tokens, columns, 1)[0]
    inputs.append((parts[rank], residual))
    time.sleep(0.1 if rank == number % size else 0)
    got, out, norm, gathered = call(*inputs[-1])
    last = call(parts[rank][-1:], residual[-1:])
    want = total(parts)
    assert torch.equal(got, want) and torch.equal(gathered, want[: tokens // size * size]), number
    assert torch.equal(out, (want.float() + residual.float()).bfloat16()), number
    assert all(torch.equal(x[-1], y[0]) for x, y in zip((got, out, norm), last)), number
if device != "cpu":
    wanted, graph = [call(*x) for x in inputs], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = [call(*x) for x in inputs]
    for number in range(20):
        time.sleep(0.01 if rank == number % size else 0)
        graph.replay()
        eager = call(*inputs[number % 5])
        assert all(torch.equal(x, y) for x, y in zip(eager, wanted[number % 5])), number
    for got, want in zip(replayed, wanted):
        assert all(torch.equal(x, y) for x, y in zip(got, want))
one.check()
one.destroy()
"""
# Rows of the ranks' experts, ids of all others, and the rows themselves as results: one for each rank of a token.
EXPERTS = """
one = MoeAlltoAll(
    Mapping(size, rank, tp_size=size, moe_ep_size=size), 16, 3, 4 * size, hidden_size=64, group=dist.group.WORLD, device=device
)
for number in range(60):
    most = int(torch.randint(1, 17, ()))
    rows, ids = drawn(most, 64), [torch.randint(0, 4 * size, (most, 3)).int().to(device) for _ in range(size)]
    owned = torch.stack([(x[..., None] // 4 == torch.arange(size, device=device)).any(1) for x in ids])
    received = one.dispatch(ids[rank], [rows[rank], ids[rank]], most, -1, 1)
    for sender in range(size):
        here = owned[sender, :, rank]
        assert torch.equal(received[0][sender][here], rows[sender][here]), number
        assert torch.equal(received[1][sender], ids[sender].where(here[:, None], torch.tensor(-1, device=device, dtype=torch.int32)))
    got = one.combine(received[0], most)
    assert torch.equal(got, (rows[rank].float() * owned[rank].sum(1, keepdim=True)).bfloat16()), number
one.check()
one.destroy()
"""
OLDER = """
handles, table, sizes = _trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
    rank, size, 8, 512, group=dist.group.WORLD, create_metadata=True, device=device
)
buffer = cuda_ipc.create_shared_buffer(_vllm.vllm_meta_size(), dist.group.WORLD, device=device)
number = _vllm.vllm_init_custom_ar(buffer, torch.empty(8), rank, True)
for _ in range(10):
    parts = drawn(8, 512)
    want, got, more = total(parts), torch.zeros_like(parts[0]), torch.zeros_like(parts[0])
    given = dict.fromkeys(
        "residual_in residual_out norm_out quant_out scale_out rms_gamma rms_eps scale_factor layout_code".split()
    )
    _trtllm.trtllm_allreduce_fusion(
        parts[rank], size, rank, 8, 512, table, True, True, True, 0, None, allreduce_out=got, metadata=sizes, **given
    )
    _vllm.vllm_all_reduce(number, parts[rank], more, 0, 0, 16)
    assert torch.equal(got, want) and torch.equal(more, want)
_trtllm.trtllm_destroy_ipc_workspace_for_all_reduce(handles, group=dist.group.WORLD)
_vllm.vllm_dispose(number)
cuda_ipc.free_shared_buffer(buffer, dist.group.WORLD)
"""
BACKEND = """
backend = TorchDistBackend()
assert (backend.Get_rank(), backend.Get_size()) == (rank, size)
assert backend.allgather({"rank": rank}) == tuple({"rank": one} for one in range(size))
assert backend.bcast(rank * 10, 1) == 10
backend.barrier()
half = backend.Split(rank % 2, -rank)  # in the other order
members = [one for one in reversed(range(size)) if one % 2 == rank % 2]
assert (half.Get_rank(), half.Get_size()) == (members.index(rank), len(members))
assert half.allgather(rank) == tuple(members) and half.bcast(rank, 0) == members[0]
memory["half"] = half
"""
SPLIT = """
half = memory["half"]
part = create_allreduce_fusion_workspace("auto", half.Get_size(), half.Get_rank(), 4, 8, torch.float32, comm_backend=half, device=device)
for _ in range(20):
    x = torch.full((4, 8), float(rank + 1), device=device)
    got = allreduce_fusion(x, part, 0)
    assert (got == sum(one + 1 for one in range(size) if one % 2 == rank % 2)).all()
    assert torch.equal(allreduce_fusion(x.bfloat16()[:1].repeat(3, 1), memory["one"], 0)[0, :1].cpu(), torch.tensor([size * (size + 1) / 2]).bfloat16())
part.destroy()
"""
# Many calls without a pause, of shapes that all ranks draw alike.
LONG = """
one, choices = make(), []
for _ in range(100):
    tokens, hidden = int(torch.randint(0, 9, ())), int(torch.randint(1, 65, ()))
    parts = drawn(tokens, hidden)
    choices.append((parts[rank], total(parts)))
for number in torch.randint(0, len(choices), (100_000,)).tolist():
    x, want = choices[number]
    assert torch.equal(allreduce_fusion(x, one, 0), want), number
one.check()
assert int(one._state[0]) == 100_000
"""
FAIL = "os.environ['FLASHINFER_COMM_TIMEOUT'] = '1'; make(tokens=65 if rank == 1 else 64)"
KILL = """
os.environ['FLASHINFER_COMM_TIMEOUT'] = '3'
one = make()
x = torch.ones(4, 8, dtype=torch.bfloat16, device=device)
for number in range(5):
    if rank == size - 1 and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    allreduce_fusion(x, one, 0)
    if device != "cpu":
        torch.cuda.synchronize()
one.check()
"""
AFTER = """
warnings.simplefilter("ignore")
one.destroy()
group = dist.new_group(list(range(size - 1)), use_local_synchronization=True)
again = make(group)
assert (allreduce_fusion(torch.ones(4, 8, dtype=torch.bfloat16, device=device), again, 0) == size - 1).all()
"""


# The end of the last rank of two or three. Rank 0 is late in call 0, so the others wait in it.
ENDS = {
    "killed before a call": (0, "if number == 0: end()"),
    "killed in a call": (1, "if number == 0: threading.Timer(0.2, end).start()"),
    "killed in a call of two shots": (0, "allreduce._SHOTS = 2; threading.Timer(0.2, end).start()"),
    "killed after a call": (1, "if number == 1: end()"),
    "exits after a call": (1, "if number == 1: sys.exit()"),  # without destroy()
}
END = """
os.environ['FLASHINFER_COMM_TIMEOUT'] = '3'
one = make()
x = torch.ones(64, 512, dtype=torch.bfloat16, device=device)
end = lambda: os.kill(os.getpid(), signal.SIGKILL)
for number in range(2):
    if rank == size - 1:
        ENDS
    elif number == 0:
        allreduce._SHOTS = 2 if "two shots" in step else 0
        time.sleep(0.5 if rank == 0 else 0.0)
    began_call = time.monotonic()
    try:
        result = allreduce_fusion(x, one, 0)
        if device != "cpu":
            torch.cuda.synchronize()
        one.check()
        assert (result == size).all()
    finally:
        said["waited"] = time.monotonic() - began_call
"""


def run(size: int, backend: str, steps: dict[str, str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return step -> rank -> what the rank said. Every rank but a lost one says something for every step."""
    output = end(start(RANKS, size, backend, json.dumps(steps)), 400)
    assert "Traceback" not in output and "Exception ignored" not in output, output
    status = signal.SIGKILL if any("kill" in step for step in steps) else 0
    assert f"ended {size - 1} {int(status)}\n" in output, output
    said: dict[str, dict[int, dict[str, Any]]] = {step: {} for step in steps}
    for line in output.splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            said[one["step"]][one["rank"]] = one
    for step, ranks in said.items():
        lost = size - 1 if step in ("kill", "after", *ENDS) else None
        assert sorted(ranks) == [rank for rank in range(size) if rank != lost], output
    return said


def check(size: int, backend: str, way: str) -> None:
    steps = {
        "make": MAKE,
        "calls": CALLS,
        "shares": SHARES,
        "large": LARGE,
        "experts": EXPERTS,
        "older": OLDER,
        "backend": BACKEND,
        "split": SPLIT,
        "fail": FAIL,
        "kill": KILL,
        "after": AFTER,
    }
    said = run(size, backend, steps)
    for step in ("make", "calls", "shares", "large", "experts", "older", "backend", "split", "after"):
        assert not any("error" in one for one in said[step].values()), said[step]
    assert {one["way"] for one in said["calls"].values()} == {way}
    texts = {one["text"] for one in said["fail"].values()}
    assert len(texts) == 1 and "on rank 1, wanted" in texts.pop(), "ranks raise different errors"
    for one in said["kill"].values():
        assert one["error"] == "GroupError" and one["ranks"] == [size - 1] and one["seconds"] < 60
        assert one["text"] == f"allreduce_fusion: rank {size - 1} did not arrive within 3 s in call 3"


def test_four_processes():
    """Calls, subgroups, a failed set-up, a rank that is killed, and a workspace of those that remain."""
    check(4, "gloo", "memfd")


def test_two_processes_on_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(2, "nccl", "vmm")


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("way", ENDS)
def test_a_rank_that_ends(way, device):
    """The others raise at their bound, naming it. A new workspace of them works.

    A call that has all of the rank's words is right, even if the rank has died since.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    number, code = ENDS[way]
    size, backend = (2, "nccl") if device == "cuda" else (3, "gloo")
    said = run(size, backend, {way: END.replace("ENDS", code), "after": AFTER})
    for one in said[way].values():
        assert one["error"] == "GroupError" and one["ranks"] == [size - 1], one
        # The kernel of a killed process may run on until the driver removes it, and then end a call of two shots.
        calls = {number, 1} if device == "cuda" else {number}
        late = f"allreduce_fusion: rank {size - 1} did not arrive within 3 s in call "
        assert one["text"] in {f"{late}{call}" for call in calls}, one
        assert one["waited"] < 60, one  # a bound of 3 s, on a busy machine
    assert not any("error" in one for one in said["after"].values()), said["after"]


@pytest.mark.slow
def test_a_hundred_thousand_calls():
    """The bits of every call, between two processes."""
    said = run(2, "gloo", {"long": LONG})["long"]
    assert not any("error" in one for one in said.values()), said


IMPORTS = """
    import builtins, ctypes, importlib, json, pkgutil
    import torch
    found, real = [], builtins.__import__

    def recorded(name, globals=None, locals=None, fromlist=(), level=0):
        if (globals or {}).get("__name__", "").startswith("flashinfer"):
            every = (name, *(f"{name}.{part}" for part in fromlist or ()))
            found.extend(one for one in every if one.startswith("torch.distributed"))
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = recorded
    import flashinfer.comm
    for module in pkgutil.iter_modules(flashinfer.comm.__path__):
        importlib.import_module(f"flashinfer.comm.{module.name}")
    context = torch.cuda.is_initialized()
    if torch.cuda.device_count():
        driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuInit(0) == 0
        assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
        context = context or active.value != 0
    print(json.dumps([found, context]))
"""


def test_import_has_no_effects():
    """No module of the package imports torch.distributed or creates a CUDA context when it is imported."""
    said = end(start(IMPORTS))
    assert said.strip() == "[[], false]", said
