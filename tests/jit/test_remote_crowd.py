"""Many processes of many hosts with one store: one per host asks and compiles, one publisher wins."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from flashinfer.jit.remote import transfer
from flashinfer.jit.remote.transport import Store

from ..support.processes import answer, answering, end, start
from ..support.slow import IN_CI
from ..support.stores import is_object

# A hundred processes that start on one cold host take twelve seconds of CPU time.
COLD = 100 if IN_CI else 40
# Forked, so that modules are imported once. Only the number of processes matters.
CROWD = """
    import ctypes, os, random, sys
    import cryptography.hazmat.primitives.serialization
    from flashinfer.jit import build, gen_jit_spec
    from flashinfer.jit.remote import transfer
    folder, processes, hosts, *sources = sys.argv[1:]
    children = []
    for number in range(int(processes)):
        if (child := os.fork()) == 0:
            os.environ["FLASHINFER_WORKSPACE_DIR"] = f"{folder}/host-{number % int(hosts)}"
            right = 0
            for source in random.Random(number).sample(sources, len(sources)):
                name, path = source.split("=")
                right += ctypes.CDLL(str(gen_jit_spec(name, [path]).build().path)).answer() == int(name[1:])
            os._exit(0 if right == len(sources) else 1)
        children.append(child)
    print(sum(os.waitpid(child, 0)[1] == 0 for child in children), "are right")
"""


def run(folder, processes: int, hosts: int, specs) -> None:
    sources = [f"{spec.name}={spec.source_paths()[0]}" for spec in specs]
    output = end(start(CROWD, folder, processes, hosts, *sources))
    assert output.splitlines()[-1] == f"{processes} are right", output


def test_two_hundred_processes_on_25_hosts_and_a_warm_store(make_spec, remote, keys, host, tmp_path, compilers_started):
    specs = [make_spec(f"m{number}", answering(number)) for number in range(2)]
    host("first", f"{remote.url}/bucket", publish=True)
    for spec in specs:
        spec.build()
    host("others", f"{remote.url}/bucket")
    before = compilers_started()
    remote.asked.clear()
    run(tmp_path / "crowd", 200, 25, specs)
    assert remote.count("GET") <= 50 and compilers_started() == before and remote.listings == []
    assert remote.count("GET") == len(remote.asked) == 50


def test_twelve_processes_on_3_hosts_and_a_cold_store(make_spec, remote, keys, host, tmp_path, compilers_started):
    specs = [make_spec(f"m{number}", answering(number)) for number in range(2)]
    host("none", f"{remote.url}/bucket", publish=True)
    run(tmp_path / "crowd", 12, 3, specs)
    assert remote.count("GET") <= 3 * 2 and compilers_started() <= 3 * 2 and remote.listings == []
    assert sum(map(is_object, remote.objects)) == 2


def test_many_processes_and_one_cold_key(make_spec, remote, keys, host, tmp_path, compilers_started):
    """Many processes start on one host. Then nine more hosts of five processes fetch its build."""
    spec = make_spec("m7", answering(7))
    host("none", f"{remote.url}/bucket", publish=True)
    run(tmp_path / "one", COLD, 1, [spec])
    assert compilers_started() == 1 and remote.count("GET") == 1
    run(tmp_path / "more", 45, 9, [spec])
    assert compilers_started() == 1 and remote.count("GET") == 1 + 9


@pytest.mark.parametrize("kind", ["file", "http"])
def test_one_of_several_publishers_wins(kind, remote, tmp_path):
    url = f"unsigned+file://{tmp_path}/store" if kind == "file" else f"unsigned+{remote.url}/store"
    hows, seen, stop = [], set(), threading.Event()

    def publish(letter: bytes) -> None:
        hows.append(Store(url).put("a/b/c", letter * 300_000))

    def watch() -> None:
        while not stop.is_set():
            seen.add(Store(url).get("a/b/c"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    publishers = [threading.Thread(target=publish, args=(bytes([65 + number]),)) for number in range(6)]
    for one in publishers:
        one.start()
    for one in publishers:
        one.join()
    stop.set()
    watcher.join()
    assert sorted(hows) == ["there already"] * 5 + ["written"]
    seen |= {Store(url).get("a/b/c")}
    whole = seen - {None}
    assert len(whole) == 1 and len(set(whole.pop())) == 1


def test_a_publisher_that_is_killed_leaves_nothing_in_the_way(make_spec, host, remote, tmp_path):
    spec = make_spec("tiny", answering(7))
    url = f"unsigned+file://{tmp_path}/store"
    host("a", url, publish=True)
    kill = """
        import os, signal, sys
        from flashinfer.jit import build, gen_jit_spec
        setattr(os, sys.argv[1], lambda *words: os.kill(os.getpid(), signal.SIGKILL))
        gen_jit_spec("tiny", [sys.argv[2]]).build()
    """
    process = start(kill, "link", spec.source_paths()[0])
    end(process)
    assert process.returncode == -signal.SIGKILL
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert len(files) == 1 and files[0].name.startswith("."), "readers skip it"
    host("b", url)
    assert transfer.stores()[0].get(transfer.id_of(spec.build()).path) is None
    host("c", url, publish=True)
    spec.build()
    host("d", url)
    assert answer(spec.build()) == 7 and len(os.listdir(files[0].parent)) == 3
