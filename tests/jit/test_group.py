"""``ensure``: eight ranks on two hosts, represented by two workspaces of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashinfer.jit import ensure
from flashinfer.jit.group import RankState, assign, mismatch

from ..support.processes import answer, answering, end, start

# Ranks are forked, so that torch is imported once. A step is code that runs before a call. It may set `specs`
# and `timeout`.
RANKS = """
    import ctypes, faulthandler, json, os, signal, sys, time
    import torch.distributed as dist
    from flashinfer.jit import ensure, gen_jit_spec, group, subscribe
    sources, steps, hosts = json.loads(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    reader, writer = os.pipe()
    if (keeper := os.fork()) == 0:  # of the store: what forks ranks has no threads
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(server.port).encode())
        time.sleep(600)
    port, ranks = int(os.read(reader, 16)), []
    for rank in range(8):
        if child := os.fork():
            ranks.append(child)
            continue
        faulthandler.dump_traceback_later(380, exit=True)
        os.environ.update(hosts[rank // 4])
        specs_of = {name: gen_jit_spec(name, [source]) for name, source in sources.items()}
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=8)
        for step, code in steps.items():
            specs, timeout, said = [], 200.0, {"rank": rank, "step": step}
            exec(code)
            began = time.monotonic()
            try:
                found = ensure(specs, timeout=timeout)
                said["values"] = [ctypes.CDLL(str(one.path)).answer() for one in found]
                said["here"] = all(one.path.is_relative_to(os.environ["FLASHINFER_WORKSPACE_DIR"]) for one in found)
            except RuntimeError as err:
                said |= {"error": type(err).__name__, "text": str(err), "ranks": getattr(err, "ranks", None)}
            said |= {"at": time.monotonic(), "seconds": time.monotonic() - began}
            os.write(1, (json.dumps(said) + "\\n").encode())
        time.sleep(0.5)
        os._exit(0)
    for child in ranks:
        os.waitpid(child, 0)
    os.kill(keeper, signal.SIGKILL)
"""


class Ranks:
    """Runs steps on eight ranks. ``said[step][rank]`` is the result."""

    def __init__(self, folder: Path, sources: dict[str, str]) -> None:
        self.folder, self.sources, self.output = folder, sources, ""

    def __call__(self, steps: dict[str, str], **of_second: str) -> dict[str, dict[int, dict[str, Any]]]:
        hosts = [{"FLASHINFER_WORKSPACE_DIR": str(self.folder / f"host-{name}")} for name in "ab"]
        hosts[1] |= of_second
        self.output = end(start(RANKS, *map(json.dumps, (self.sources, steps, hosts))), 400)
        said: dict[str, dict[int, dict[str, Any]]] = {step: {} for step in steps}
        for line in self.output.splitlines():
            if line.startswith("{"):
                one = json.loads(line)
                said[one["step"]][one["rank"]] = one
        return said


@pytest.fixture
def ranks(make_spec, tmp_path) -> Ranks:
    specs = [make_spec(f"m{number}", answering(number)) for number in range(5)]
    specs.append(make_spec("broken", {"unit.cc": "int here = nowhere;\n"}))
    return Ranks(tmp_path, {spec.name: spec.source_paths()[0] for spec in specs})


ALL = "specs = [specs_of[f'm{number}'] for number in range(5)]"


def assert_same_error(said: dict[int, dict[str, Any]], kind: str, but: tuple[int, ...] = ()) -> dict[str, Any]:
    """Check that all ranks have raised the same error, and return it."""
    assert sorted(said) == [rank for rank in range(8) if rank not in but]
    assert {one.get("error") for one in said.values()} == {kind}, said
    assert len({one["text"] for one in said.values()}) == 1
    times = [one["at"] for one in said.values()]
    assert max(times) - min(times) < 5
    return next(iter(said.values()))


def test_together(ranks, compilers_started):
    """Cold, warm, with different sets, with a broken module, with a slow rank, and with a killed one."""
    said = ranks(
        {
            "cold": ALL,
            "warm": ALL,
            "differ": f"{ALL}; specs = specs[:4] if rank == 5 else specs",
            "broken": f"{ALL}; specs.append(specs_of['broken'])",
            "slow": f"{ALL}; group.REPORT_INTERVAL = 0.3; time.sleep(2 * (rank == 2))",
            "killed": f"{ALL}; timeout = 8.0; rank == 3 and os.kill(os.getpid(), signal.SIGKILL)",
        }
    )
    for step in ("cold", "warm", "slow"):
        assert all(one.get("values") == [0, 1, 2, 3, 4] and one["here"] for one in said[step].values()), said[step]
        assert len(said[step]) == 8
    assert compilers_started() == 5 * 2 + 2, "five per host, and the broken module"
    print("warm:", sorted(round(one["seconds"] * 1e3) for one in said["warm"].values()), "ms")

    error = assert_same_error(said["differ"], "GroupError")
    assert error["text"] == "rank 5 does not ask for module 'm4', which rank 0 does" and error["ranks"] == [5]
    error = assert_same_error(said["broken"], "BuildError")
    assert "building module 'broken' failed" in error["text"] and "nowhere" in error["text"]
    assert "ensure: waiting for rank 2, which has not called ensure()" in ranks.output
    error = assert_same_error(said["killed"], "GroupError", but=(3,))
    assert "rank 3 has not called ensure() after 8 s" in error["text"] and error["ranks"] == [3]


def test_with_a_store_each_module_is_built_once(ranks, compilers_started, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_STORE", f"unsigned+file://{tmp_path}/store")
    monkeypatch.setenv("FLASHINFER_STORE_PUBLISH", "1")
    said = ranks({"cold": ALL})["cold"]
    assert len(said) == 8 and all(one.get("values") == [0, 1, 2, 3, 4] and one["here"] for one in said.values()), said
    assert compilers_started() == 5, "five for both hosts"


def test_a_leader_that_is_killed_while_it_builds(ranks):
    """The others learn it by the deadline. The other leader is then done with its only module."""
    kill = "subscribe(lambda event: rank == 4 and event.kind == 'miss' and os.kill(os.getpid(), signal.SIGKILL))"
    error = assert_same_error(
        ranks({"cold": f"specs = [specs_of['m0']]; timeout = 15.0; {kill}"})["cold"], "GroupError", but=(4,)
    )
    assert error["ranks"] == [4] and "rank 4 is still building, or gone after 15 s" in error["text"]


@pytest.mark.slow
def test_a_host_without_a_compiler(ranks, compilers_started, tmp_path, monkeypatch):
    """Its error is raised by all ranks. If the other host publishes, it fetches instead."""
    error = assert_same_error(ranks({"cold": ALL}, CXX="/nowhere/g++")["cold"], "ToolchainError")
    assert "'/nowhere/g++' is not a program" in error["text"]
    built = compilers_started()
    monkeypatch.setenv("FLASHINFER_STORE", f"unsigned+file://{tmp_path}/store")
    monkeypatch.setenv("FLASHINFER_STORE_PUBLISH", "1")
    (tmp_path / "host-a").rename(tmp_path / "aside")
    said = ranks({"cold": ALL}, CXX="/nowhere/g++")["cold"]
    assert len(said) == 8 and all(one.get("values") == [0, 1, 2, 3, 4] and one["here"] for one in said.values()), said
    assert compilers_started() == built + 5


def test_without_a_group_it_builds(make_spec):
    assert [answer(one) for one in ensure([make_spec("tiny", answering(7))])] == [7]
    for timeout in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout: got .*, wanted a positive number of seconds"):
            ensure([], timeout=timeout)


def state(host: str, lacks: dict[str, str], publishes: bool = True, wants: str = "key") -> RankState:
    return RankState(host, dict.fromkeys(lacks, wants), lacks, publishes)


def test_assignment_of_builds():
    lacks = {"x": "1", "y": "2", "z": "3"}
    alone = {rank: state(f"host {rank // 2}", lacks, publishes=False) for rank in range(4)}
    assert assign(alone) == {0: {"x", "y", "z"}, 1: set(), 2: {"x", "y", "z"}, 3: set()}
    together = {rank: state(f"host {rank // 2}", lacks) for rank in range(4)}
    assert assign(together) == {0: {"x", "z"}, 1: set(), 2: {"y"}, 3: set()}
    # Another target or compiler is another build. A host without tools fetches, and one with all modules does
    # nothing.
    other = {0: state("a", lacks), 1: state("b", {"x": "9"}), 2: state("c", {"x": "", "y": ""}), 3: state("d", {})}
    assert assign(other) == {0: {"x", "y", "z"}, 1: {"x"}, 2: set(), 3: set()}
    assert assign({0: state("a", {"x": ""})}) == {0: {"x"}}, "it raises the error itself"


def test_differences_name_rank_and_module():
    same = {0: state("a", {"x": "1"}), 1: state("b", {"x": "2"})}
    assert mismatch(same, [0, 1]) is None
    for other, text in (
        (state("b", {"x": "1", "y": "1"}), "rank 7 asks for module 'y', which rank 4 does not"),
        (state("b", {}), "rank 7 does not ask for module 'x', which rank 4 does"),
        (state("b", {"x": "1"}, wants="another"), "rank 7 has other sources of module 'x' than rank 4"),
    ):
        error = mismatch({0: state("a", {"x": "1"}), 1: other}, [4, 7])
        assert str(error) == text and error.ranks == (7,)
