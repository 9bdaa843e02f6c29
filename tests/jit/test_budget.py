"""The machine's limit of compilers: CPUs, memory, cgroups, slots, and the program that runs a compiler."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashinfer.jit import history, worker
from flashinfer.jit.worker import available_memory, cpu_limit, slots
from flashinfer.jit.worker.slots import take_slot

from ..support.processes import Compiler, end, start, stopped, until

GIB = 1 << 30
TAKE = """
    import sys, time
    from flashinfer.jit.worker.slots import take_slot
    slot = take_slot(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(slot, flush=True)
    time.sleep(float(sys.argv[4]))
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that writes fake kernel files: path below /proc or /sys/fs/cgroup -> text."""
    monkeypatch.setattr(worker, "PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(worker, "CGROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))

    def write(files: dict[str, object]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


@pytest.fixture
def holders(tmp_path):
    """Return a function that starts a process which takes a slot (limit, bytes) and holds it."""
    processes = []

    def hold(limit: int, expected: int, wait: bool = True) -> subprocess.Popen[str]:
        process = start(TAKE, tmp_path / "slots", limit, expected, 600)
        processes.append(process)
        assert not wait or process.stdout.readline().strip().isdigit()
        return process

    yield hold
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "files, want",
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a/b", "cgroup/a/b/cpu.max": "max 100000"}, 8),
        ({"proc/self/cgroup": "0::/a/b", "cgroup/a/b/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a/b", "cgroup/a/cpu.max": "290000 100000", "cgroup/a/b/cpu.max": "max 100000"}, 2),
        ({"proc/self/cgroup": "0::/", "cgroup/cpu.max": "1000 100000"}, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/d", "cgroup/cpu/d/cpu.cfs_quota_us": -1, "cgroup/cpu/d/cpu.cfs_period_us": 100000}, 8),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/d", "cgroup/cpu/d/cpu.cfs_quota_us": 400000, "cgroup/cpu/d/cpu.cfs_period_us": 100000}, 4),
        # In a container the path is often the host's, while the mounted files are the container's.
        ({"proc/self/cgroup": "4:cpu:/docker/x", "cgroup/cpu/cpu.cfs_quota_us": 200000, "cgroup/cpu/cpu.cfs_period_us": 100000}, 2),
    ],
)  # fmt: skip
def test_cpu_limit(machine, files, want):
    machine(files)
    assert cpu_limit() == want


@pytest.mark.parametrize(
    "files, want",
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 2048 kB"}, 2 << 20),
        ({"proc/meminfo": "MemAvailable: 4096 kB", "proc/self/cgroup": "0::/a", "cgroup/a/memory.max": "max", "cgroup/a/memory.current": 7}, 4 << 20),
        ({"proc/meminfo": "MemAvailable: 4096 kB", "proc/self/cgroup": "0::/a/b", "cgroup/a/memory.max": 3000000,
          "cgroup/a/memory.current": 2000000, "cgroup/a/memory.stat": "anon 5\ninactive_file 500000"}, 1500000),
        ({"proc/meminfo": "MemAvailable: 4096 kB", "proc/self/cgroup": "9:memory:/d", "cgroup/memory/d/memory.limit_in_bytes": 3000000,
          "cgroup/memory/d/memory.usage_in_bytes": 2900000, "cgroup/memory/d/memory.stat": "inactive_file 1\ntotal_inactive_file 50000"}, 150000),
        ({"proc/meminfo": "MemAvailable: 4096 kB", "proc/self/cgroup": "garbage"}, 4 << 20),
    ],
)  # fmt: skip
def test_available_memory(machine, files, want):
    machine(files)
    assert available_memory() == want


def test_jobs_are_limited_by_cpus(machine, monkeypatch):
    assert history.compilers() == 8 and history.compilers(3) == 3 and history.compilers(100) == 8
    monkeypatch.setenv("MAX_JOBS", "5")
    assert history.compilers() == 5 and history.compilers(6) == 6
    machine({"proc/self/cgroup": "0::/", "cgroup/cpu.max": "200000 100000"})
    assert history.compilers() == 2 and history.compilers(6) == 2


def has_slot(process: subprocess.Popen[str]) -> bool:
    """Return whether the process reports a slot. Its number does not matter."""
    return bool(select.select([process.stdout], [], [], 300)[0]) and process.stdout.readline().strip().isdigit()


def has_turn(folder: Path, process: subprocess.Popen[str]) -> bool:
    """Return whether the process is first in the queue for slots, before all later ones."""
    until(lambda: json.loads((folder / "turn").read_text() or "{}").get("pid") == process.pid)
    return True


def silent(process: subprocess.Popen[str]) -> bool:
    """Return whether the process runs without output for half a second."""
    return process.poll() is None and not select.select([process.stdout], [], [], 0.5)[0]


def test_no_more_than_the_limit(holders, tmp_path):
    first, _ = holders(2, 0), holders(2, 0)
    third = holders(2, 0, wait=False)
    assert silent(third)
    assert len(list((tmp_path / "slots").glob("slot.*"))) == 3, "however often it has tried"
    first.kill()
    assert has_slot(third), "the slot of a killed holder is free"


def test_a_smaller_limit_counts_everybody(holders, tmp_path):
    """A process with MAX_JOBS=1 waits for those with larger limits, whatever their slots."""
    first, second = holders(4, 0), holders(4, 0)
    first.kill()
    waiting = holders(1, 0, wait=False)
    assert silent(waiting)
    second.kill()
    assert has_slot(waiting)


def test_memory_decides(holders, tmp_path, monkeypatch):
    """Three units of 4 GiB do not run together in 10 GiB.

    Memory that the first two use already counts once.
    """
    monkeypatch.setattr(slots, "available_memory", lambda: 10 * GIB)
    holders(8, 4 * GIB), holders(8, 4 * GIB)
    folder = str(tmp_path / "slots")
    assert slots.free_slot(folder, 8, 4 * GIB) is None and slots.free_slot(folder, 2, GIB) is None
    small = slots.free_slot(folder, 8, GIB)
    assert small is not None
    os.close(small[1])
    monkeypatch.setattr(slots, "available_memory", lambda: 5 * GIB)
    assert slots.free_slot(folder, 8, 4 * GIB) is None
    monkeypatch.setattr(slots, "resident_memory", lambda groups: dict.fromkeys(groups, 4 * GIB))
    grown = slots.free_slot(folder, 8, 4 * GIB)
    assert grown is not None
    os.close(grown[1])


def test_resident_memory_of_a_group(tmp_path):
    program = "data = bytearray(64 << 20); print('there', flush=True); import time; time.sleep(600)"
    process = start(program)
    try:
        assert process.stdout.readline() == "there\n"
        assert 64 << 20 < worker.resident_memory({process.pid})[process.pid] < 128 << 20
    finally:
        end_now(process)


def end_now(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_heavy_unit_runs_without_others(holders, tmp_path):
    """The heavy unit waits until nothing else runs, and then runs although it does not fit."""
    light = holders(4, 0)
    heavy = holders(4, 1 << 60, wait=False)
    assert has_turn(tmp_path / "slots", heavy) and silent(heavy)
    after = holders(4, 0, wait=False)
    assert silent(after) and silent(heavy)
    light.kill()
    assert has_slot(heavy) and silent(after), "a later unit does not overtake it"
    heavy.kill()
    assert has_slot(after)


def test_stopped_units_do_not_stop_others(holders, tmp_path):
    """A stopped compiler uses no CPU. A process that stops at the head of the queue is passed by."""
    holder = holders(1, 0)
    os.kill(holder.pid, signal.SIGSTOP)
    until(lambda: stopped(holder.pid))
    second = holders(1, 0)
    waiting = holders(1, 0, wait=False)
    assert has_turn(tmp_path / "slots", waiting)
    os.kill(waiting.pid, signal.SIGSTOP)
    until(lambda: stopped(waiting.pid))
    third = holders(1, 0, wait=False)
    assert silent(third)
    second.kill()
    assert has_slot(third)


DECIDE = """
    import os, signal, sys
    from flashinfer.jit.worker import write_note
    from flashinfer.jit.worker import open_lock, try_lock
    turn, slot = open_lock(f"{sys.argv[1]}/turn"), open_lock(f"{sys.argv[1]}/slot.0")
    assert try_lock(turn) and try_lock(slot)
    write_note(turn, {"pid": os.getpid()})
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("note", ["", '{"pid": 99999999, "group": 99999999, "expected": 0}'])
def test_a_unit_stopped_before_it_writes_its_note(holders, tmp_path, note):
    """The slot is locked, but its note is not written yet, or is that of a process that has ended."""
    (tmp_path / "slots").mkdir()
    (tmp_path / "slots" / "slot.0").write_text(note)
    process = start(DECIDE, tmp_path / "slots")
    try:
        until(lambda: stopped(process.pid))
        waiting = holders(1, 0, wait=False)
        assert has_slot(waiting)
    finally:
        end_now(process)


def test_no_locks_no_budget(tmp_path, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    assert take_slot(str(tmp_path / "slots"), 1, 0) == 0
    (tmp_path / "file").touch()
    assert take_slot(str(tmp_path / "file" / "slots"), 1, 0) == 0


def test_memory_of_the_last_build_is_expected(make_spec, workspace, monkeypatch, tmp_path):
    spec = make_spec("weighed", {"a.cc": "int a;\n", "b.cu": ""}, backend="cpu")
    assert history.expected_memory({}, "x.cu") > history.expected_memory({}, "x.cc") > 0
    past = {"a.cc": history.Past(1.0, 123456789)}
    history.remember("weighed", past)
    assert history.past_of("weighed") == past and history.expected_memory(past, "a.cc") == 123456789
    history.remember("weighed", {"b.cu": history.Past(2.0, 5)})
    assert history.past_of("weighed").keys() == {"a.cc", "b.cu"}
    assert spec.backend == "cpu"


@pytest.fixture
def run_unit(tmp_path):
    """Return a function that runs a command as ninja would."""
    read, write = os.pipe()
    (tmp_path / "out").mkdir()
    run = {"alive": read, "slots": str(tmp_path / "slots"), "limit": 1, "expected": {}}
    (tmp_path / "out" / worker.RUN).write_text(json.dumps(run))

    def start_unit(*command: str, file: str = "out/x.o") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(slots.__file__).with_name("__main__.py")), file, "--", *command],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[read],
            start_new_session=True,
        )

    start_unit.builder = write
    yield start_unit
    for descriptor in (read, write):
        try:
            os.close(descriptor)
        except OSError:
            continue


def test_a_unit_passes_on_output_and_status(run_unit, tmp_path):
    """The worker reports the command before the compiler's output, and its exit code after it."""

    def ends(code: int, *words: str) -> None:
        process = run_unit(*command)
        first, *said, last = filter(None, end(process).splitlines())
        assert json.loads(first.removeprefix(worker.UNIT)) == {"file": "out/x.o", "command": command}
        assert said == list(words)
        assert json.loads(last.removeprefix(worker.UNIT)) == {"file": "out/x.o", "code": code}
        assert process.returncode == code if code >= 0 else process.returncode != 0

    command = ["sh", "-c", "echo out; echo err >&2; exit 3"]
    ends(3, "out", "err")
    command = ["/nowhere/compiler"]
    ends(127, "fatal error: /nowhere/compiler: No such file or directory")
    command = ["sh", "-c", "printf out; kill -9 $$"]
    ends(-9, "out", "fatal error: sh was killed by signal 9")


def test_a_unit_keeps_a_record(run_unit, tmp_path):
    memory = "data = bytearray(200 << 20); import time; time.sleep(0.2)"
    end(run_unit(sys.executable, "-I", "-S", "-c", memory))
    record = worker.read_note_at(str(tmp_path / "out" / "x.o.json"))
    assert record["queued"] <= record["start"] < record["start"] + 0.2 < record["end"] < time.time()
    assert 200 << 20 < record["peak"] < 300 << 20 and record["slot"] == 0


def test_a_unit_ends_with_its_builder(run_unit, tmp_path):
    process = run_unit("sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 600; true")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.close(run_unit.builder)
    end(process)
    child = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_text())


def test_a_unit_that_waits_ends_with_its_builder(run_unit, holders):
    holders(1, 0)
    process = run_unit("true")
    time.sleep(0.2)
    assert process.poll() is None
    os.close(run_unit.builder)
    end(process)


def test_existing_objects_are_not_compiled_again(run_unit, tmp_path):
    """An object is made again only if its bytes, or those of its inputs, have changed.

    Times do not matter.
    """
    source, made, count = tmp_path / "in", tmp_path / "out" / "x.o", tmp_path / "count"
    compile_it = f"echo >> {count}; cat {source} > {made}; echo 'x.o: {source}' > {made}.d"

    def runs() -> int:
        process = run_unit("sh", "-c", compile_it)
        *_, last = end(process).splitlines()
        assert json.loads(last.removeprefix(worker.UNIT))["code"] == process.returncode == 0
        return len(count.read_text())

    source.write_text("one")
    assert (runs(), runs()) == (1, 1)
    os.utime(source)
    assert runs() == 1
    source.write_text("two")
    assert (runs(), runs()) == (2, 2)
    made.write_text("tw")
    assert (runs(), runs()) == (3, 3) and made.read_text() == "two"
    for path in (made, Path(f"{made}.d"), Path(f"{made}.json")):
        before = runs()
        path.unlink()
        assert (runs(), runs()) == (before + 1, before + 1)
        path.write_text("")
        assert (runs(), runs()) == (before + 2, before + 2)


def test_a_build_weighs_its_units(make_spec, tmp_path, monkeypatch):
    """Two units that each need the whole memory do not run at once, although there are two slots."""
    monkeypatch.setattr(history, "cpu_limit", lambda: 2)
    spec = make_spec("weighty", {"a.cc": "int a;\n", "b.cc": "int b;\n"})
    compiler = Compiler(tmp_path, 0.3)
    monkeypatch.setenv("CXX", str(compiler.path))
    history.remember("weighty", {source: history.Past(1.0, 1 << 60) for source in spec.sources})
    spec.build()
    assert compiler.started == 3 and max(compiler.runs()) == 1
