"""build_aot.py --cluster: builds on workers of a Dask scheduler, each with directories of its own.

Schedulers and workers are local processes. Where a test counts compilers, a worker's compiler is a script.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashinfer.cli.main import main
from flashinfer.errors import ArtifactError, BuildError, ToolchainError
from flashinfer.jit.artifact import sealed
from flashinfer.jit.build import make_request
from flashinfer.jit.cluster import address
from flashinfer.jit.machine.target import Target, native_level
from flashinfer.jit.machine.toolchain import find_nvcc
from flashinfer.jit.modules import Matrix, families, matrix_specs
from flashinfer.jit.modules.page import gen_page_module
from flashinfer.jit.resolve import find_existing, resolve
from flashinfer.jit.specfile import write_specs
from flashinfer.jit.specjson import to_json

from ..support.cluster import FAKE, Cluster, environment, free_port
from ..support.processes import ROOT, answer, answering, until

pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
SCRIPT = ROOT / "scripts" / "build_aot.py"
KILLS = 10
# Longer than any wait below, and found among processes only if this test started it.
LONG = 600 + random.random()


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    (tmp_path / "cluster").mkdir()
    made = Cluster(tmp_path / "cluster")
    yield made
    made.end()


def specs_file(path: Path, specs, *archs: str) -> Path:
    lines = [
        {"spec": to_json(spec), "key": spec.key, "needs": {}, "archs": list(archs or [native_level()])}
        for spec in specs
    ]
    write_specs(path, lines)
    return path


@pytest.fixture
def modules(make_spec, tmp_path):
    """Return a function that makes small modules and a file of their specs."""

    def make(count: int) -> tuple[list, Path]:
        specs = [make_spec(f"m{number}", answering(number)) for number in range(count)]
        return specs, specs_file(tmp_path / "specs.jsonl", specs)

    return make


def command(cluster: Cluster, specs: Path, out: Path, *options: str) -> list[str]:
    arguments = ["--specs", str(specs), "--out-dir", str(out), "--cluster", cluster.address, *options]
    return [sys.executable, str(SCRIPT), *arguments]


def aot(cluster: Cluster, specs: Path, out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words, variables = command(cluster, specs, out, *options), environment(**variables)
    return subprocess.run(words, capture_output=True, text=True, env=variables, timeout=600)


def started(cluster: Cluster, specs: Path, out: Path) -> subprocess.Popen[str]:
    pipe, words = subprocess.PIPE, command(cluster, specs, out, "--json")
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment())


def alive(text: str) -> list[str]:
    """Return the command lines of processes that contain ``text``."""
    lines = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if text in line and not line.startswith("ps ")]


def test_as_a_local_build(cluster, modules, tmp_path, workspace):
    """Keys, bytes and table equal those of a local build. Files travel once, and both sides reuse builds."""
    specs, file = modules(3)
    cluster.worker(), cluster.worker()
    page = tmp_path / "build.html"
    done = aot(cluster, file, tmp_path / "out", "--json", "--report", str(page))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["name"], row["how"]) for row in rows] == [("m0", "built"), ("m1", "built"), ("m2", "built")]
    assert all(row["size"] > 0 and row["seconds"] > 0 for row in rows) and "3 built" in done.stderr
    assert sorted(cluster.compiled()) == ["m0", "m1", "m2"] and '"kind": "compile"' in page.read_text()
    assert not list(workspace.rglob("*.so")), "nothing was compiled here"
    for number, spec in enumerate(specs):
        request = make_request(spec, tmp_path / "out" / spec.name, Target("cpu", (native_level(),), True))
        there = find_existing(request).artifact
        assert there is not None and answer(there) == number, "this machine accepts it"
        local = spec.build()
        assert local.manifest["build_key"] == there.manifest["build_key"]
        assert local.path.read_bytes() == there.path.read_bytes(), "it contains no path"
    again = aot(cluster, file, tmp_path / "out", "--json")
    assert {row["how"] for row in json.loads(again.stdout)} == {"reused"} and len(cluster.compiled()) == 3
    other = aot(cluster, file, tmp_path / "other", "--json", FLASHINFER_WORKSPACE_DIR=str(tmp_path / "new"))
    assert other.returncode == 0 and len(cluster.compiled()) <= 6, "a worker sends its existing module again"


@pytest.mark.slow
def test_neither_the_scheduler_nor_every_worker_needs_this_package(cluster, modules, tmp_path):
    """Any scheduler works. A worker without the package is reported at once, and the others build."""
    _, file = modules(2)
    cluster.worker(has_package=False)
    cluster.joined(1)
    cluster.worker()
    done = aot(cluster, file, tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["how"] for row in json.loads(done.stdout)} == {"built"}
    assert re.search(r"worker tcp://\S+ is not used: .*flashinfer", done.stderr), done.stderr


def test_files_of_the_project_travel_and_the_workers_copy_of_them_is_not_used(cluster, tmp_path, python):
    """The client's tree differs from the package that is installed on the workers."""
    tree = tmp_path / "tree"
    for name in ("flashinfer", "csrc", "include", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    # These replace sources that take seconds.
    for name, unit in (("page.cc", "binding"), ("page_cpu.cc", "kernels")):
        (tree / "csrc" / name).write_text(f'#include "page_config.h"\nextern "C" int {unit}() {{ return 1; }}\n')
    cluster.worker()
    options = ["--families", "page", "--backend", "cpu", "--cluster", cluster.address, "--json"]

    def run(script: Path, out: str, *more: str, **variables: str) -> dict:
        done = subprocess.run(
            [sys.executable, str(script), "--out-dir", str(tmp_path / out), *more],
            capture_output=True, text=True, env={**environment(**variables), "PYTHONPATH": ""}, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / out / "page_cpu" / "manifest.json").read_text())

    far = run(tree / "scripts" / "build_aot.py", "far", *options)
    near = run(tree / "scripts" / "build_aot.py", "near", *options[:4])
    assert far["key"] == near["key"] and far["build_key"] == near["build_key"] and far["sha256"] == near["sha256"]
    assert far["key"] != gen_page_module("cpu").key


@pytest.mark.slow
def test_the_cpu_matrix_on_four_workers(cluster, tmp_path):
    """Every module of the matrix, with one head size, has its local key, and every unit is compiled once."""
    for _ in range(4):
        cluster.worker(compiles=FAKE)
    names = families()
    words = [sys.executable, str(SCRIPT), "--backend", "cpu", "--families", ",".join(names), "--head-dims", "64"]
    words += ["--cluster", cluster.address, "--json", "--out-dir", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    specs = matrix_specs(Matrix(backends=("cpu",), head_dims=("64",)), names)
    target = Target("cpu", (native_level(),), True)
    assert sorted(row["name"] for row in json.loads(done.stdout)) == [spec.name for spec in specs] and len(specs) >= 4
    assert all(find_existing(make_request(spec, tmp_path / "out" / spec.name, target)).artifact for spec in specs)
    assert Counter(cluster.compiled()) == {spec.name: len(spec.units()) for spec in specs}
    used = {line.split()[0] for line in cluster.log.read_text().splitlines() if line[:1].isdigit()}
    assert used == {"1", "2", "3", "4"}


@pytest.mark.slow
def test_a_cuda_module_has_the_bytes_of_a_local_build(cluster, make_spec, tmp_path):
    try:
        find_nvcc()
    except ToolchainError as err:
        pytest.skip(str(err))
    text = "__global__ void fill(int* out) { *out = 3; }\nvoid run(int* out) { fill<<<1, 1>>>(out); }\n"
    spec = make_spec("filled", {"host.cc": "int host() { return 1; }\n", "unit.cu": text}, backend="cuda")
    file = specs_file(tmp_path / "specs.jsonl", [spec], "9.0a")
    cluster.worker()
    done = aot(cluster, file, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    near, far = (json.loads((one / "manifest.json").read_text()) for one in (
        resolve([make_request(spec, target=Target("cuda", ("9.0a",), True))])[0].artifact.directory,
        tmp_path / "out" / "filled",
    ))  # fmt: skip
    assert near["build_key"] == far["build_key"] and near["sha256"] == far["sha256"], (
        "it contains no path and no process id"
    )


def test_a_compile_error_is_final_and_shown_as_here(cluster, make_spec, tmp_path):
    broken = make_spec(
        "broken", {"unit.cc": '#include "unit.h"\nint f() { return nothing; }\n', "unit.h": "#pragma once\n"}
    )
    fine = make_spec("fine", answering(1))
    cluster.worker(), cluster.worker()
    done = aot(cluster, specs_file(tmp_path / "specs.jsonl", [broken, fine]), tmp_path / "out")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("FAILED broken: ")
    assert cluster.compiled().count("broken") == 1 and (tmp_path / "out" / "fine").exists()
    with pytest.raises(BuildError) as caught:
        broken.build()

    def plain(text: str) -> list[str]:  # without the names of compilers and the tokens of build directories
        lines = [line for line in text.splitlines() if "  log: " not in line]
        text = re.sub(r"[0-9a-f]{16}-[0-9a-f]{12}", "DIRECTORY", "\n".join(lines))
        return re.sub(r"command: \S+g\+\+", "command: g++", text).splitlines()

    told = done.stderr[done.stderr.index("building module 'broken'") :]
    home = [str(path.parent) for path in (tmp_path / "workspace" / "sources").rglob("unit.h")]
    here = plain(str(caught.value))
    assert plain(told.replace(home[0], str(Path(broken.source_paths()[0]).parent)))[: len(here)] == here
    assert str(tmp_path / "cluster" / "worker") not in told, "paths of this machine"
    assert Path(re.search(r"log: (\S+)", told)[1]).read_text().count("nothing") >= 1


@pytest.mark.slow
def test_workers_are_killed_at_random_moments(cluster, modules, tmp_path):
    """Four workers are killed and replaced.

    Nothing is lost, and a kill costs at most one module in progress.
    """
    count = 4 * KILLS
    _, file = modules(count)
    workers = [cluster.worker(seconds=0.4) for _ in range(4)]
    client = started(cluster, file, tmp_path / "out")
    killed = 0
    until(lambda: len(cluster.compiled()) >= 2, what="compilers run")
    while killed < KILLS and client.poll() is None:
        time.sleep(random.uniform(0, 0.8))
        victim = workers.pop(random.randrange(len(workers)))
        os.killpg(victim.pid, signal.SIGKILL)
        killed += 1
        workers.append(cluster.worker(seconds=0.4))
    out, err = client.communicate(timeout=600)
    rows = json.loads(out)
    assert client.returncode == 0 and len(rows) == count and {row["how"] for row in rows} <= {"built", "reused"}, err
    assert killed == KILLS, "the kills happened during the build"
    compiled = cluster.compiled()
    assert len(compiled) <= count + killed, f"{len(compiled)} compiles of {count} modules, {killed} kills"
    for number in range(count):
        assert (tmp_path / "out" / f"m{number}" / f"m{number}.so").exists()
    place = str(cluster.folder / "worker")
    until(lambda: not [line for line in alive(place) if "sleep" in line], what="all compilers end")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_client_that_ends_ends_all_compilers(how, cluster, modules, tmp_path):
    _, file = modules(4)
    [cluster.worker(seconds=LONG) for _ in range(2)]
    client = subprocess.Popen(
        command(cluster, file, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    until(lambda: len(alive(f"sleep {LONG}")) == 2, what="two compilers run")
    client.send_signal(how)
    client.communicate(timeout=600)
    until(lambda: not alive(f"sleep {LONG}"), what="all compilers end")
    assert all(process.poll() is None for process in cluster.processes), "the workers still run"
    assert not list((tmp_path / "out").glob("*/*.so"))


@pytest.mark.slow
def test_the_compilers_of_a_killed_worker_end_with_it(cluster, modules, tmp_path):
    _, file = modules(1)
    slow = cluster.worker(seconds=LONG)
    client = started(cluster, file, tmp_path / "out")
    until(lambda: alive(f"sleep {LONG}"), what="a compiler runs")
    os.kill(slow.pid, signal.SIGKILL)
    until(lambda: not alive(f"sleep {LONG}"), what="it ends")
    cluster.worker()
    assert "1 built" in client.communicate(timeout=600)[1] and client.returncode == 0, "a later worker built it"


@pytest.mark.slow
def test_a_worker_that_leaves(cluster, modules, tmp_path):
    """A worker leaves in the middle of a compile. Its module goes to the other worker."""
    _, file = modules(6)
    leaving = cluster.worker(seconds=0.8)
    cluster.worker(seconds=0.8)
    client = started(cluster, file, tmp_path / "out")
    until(lambda: len(cluster.compiled()) >= 2, what="both compile")
    leaving.send_signal(signal.SIGTERM)
    out, err = client.communicate(timeout=600)
    assert client.returncode == 0 and {row["how"] for row in json.loads(out)} == {"built"}, err
    assert len(list((tmp_path / "out").glob("*/*.so"))) == 6 and len(cluster.compiled()) <= 7
    assert leaving.wait(timeout=600) is not None, "it is gone"


@pytest.mark.slow
def test_the_scheduler_goes(cluster, modules, tmp_path):
    _, file = modules(2)
    cluster.worker(seconds=LONG)
    client = subprocess.Popen(
        command(cluster, file, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(),
    )  # fmt: skip
    until(lambda: alive(f"sleep {LONG}"), what="a compiler runs")
    os.kill(cluster.scheduler.pid, signal.SIGKILL)
    said = client.communicate(timeout=600)[0]  # Dask gives up on a scheduler after half a minute
    assert client.returncode == 2 and said.splitlines()[-1].startswith(
        f"error: the scheduler at {cluster.address} is gone"
    )
    until(lambda: not alive(f"sleep {LONG}"), what="its compilers end")


@pytest.mark.slow
def test_other_compilers_are_named_and_not_used(cluster, modules, tmp_path):
    """One worker has another compiler, one has none, one has a full disk. A suitable worker joins later."""
    _, file = modules(3)
    cluster.worker(version="(Other) 99.1")
    cluster.worker(CXX="/none/g++")
    cluster.worker(FLASHINFER_WORKSPACE_DIR="/dev/full/workspace", TMPDIR="/dev/full")
    cluster.joined(3)
    done = aot(cluster, file, tmp_path / "out", "--cluster-wait", "6")
    assert done.returncode == 2, done.stdout + done.stderr
    last = done.stderr.splitlines()[-1]
    assert "no worker could build m0, m1, m2 for 6 s: wanted cpu: cxx " in last
    assert "cxx (Other) 99.1" in last and "'/none/g++' is not a program" in last
    assert done.stderr.count("99.1") == 2, "reported once, and at the end"
    client = subprocess.Popen(
        command(cluster, file, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )
    time.sleep(2)
    cluster.worker()
    assert b"3 built" in client.communicate(timeout=600)[0] and client.returncode == 0
    assert {line.split()[0] for line in cluster.log.read_text().splitlines()} == {"4"}


@pytest.mark.slow
def test_a_disk_that_fills_while_it_builds(cluster, modules, tmp_path):
    """The compiler's message about a full disk is no compile error: another worker builds the module."""
    _, file = modules(2)
    place, log = tmp_path / "full", tmp_path / "failures"
    place.write_text(
        f"#!/bin/sh\ncase $1 in --version) exec g++ --version;; esac\necho one >> {log}\n"
        'echo "unit.cc:1: fatal error: error writing to unit.o: No space left on device" >&2\nexit 1\n'
    )
    place.chmod(0o755)
    cluster.worker(CXX=str(place))
    client = subprocess.Popen(
        command(cluster, file, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment(),
    )  # fmt: skip
    until(log.exists, what="the disk is full")
    cluster.worker()
    said = client.communicate(timeout=600)[0]
    assert client.returncode == 0 and "2 built" in said and said.count("No space left on device") == 1, said


@pytest.mark.slow
def test_a_client_without_a_compiler(cluster, modules, tmp_path, python):
    """The client uses the tools that most workers share, and reports that."""
    specs, file = modules(1)
    for version in ("(Most) 1.0", "(Few) 2.0", "(Most) 1.0"):
        cluster.worker(version=version)
    cluster.joined(3)
    done = aot(cluster, file, tmp_path / "out", PATH="/none", CXX="")
    assert done.returncode == 0, done.stderr
    assert "built by the tools of most workers, cxx (Most) 1.0" in done.stderr and "worker" in done.stderr
    manifest = json.loads((tmp_path / "out" / "m0" / "manifest.json").read_text())
    assert manifest["toolchain"]["cxx"] == "(Most) 1.0" and manifest["key"] == specs[0].key


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:8786", "http://host:1", "tcp://host", "tcp://:8786", "tcp://host:x", "tcp://host:99999",
             "tcp://host:1/path", "tcp://a@host:1", "tcp://ho st:1", "tls://host"],
)  # fmt: skip
def test_bad_addresses(text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["build", "--cluster", text])
    assert caught.value.code == 2 and "wanted tcp://HOST:PORT or tls://HOST:PORT" in capsys.readouterr().err


def test_tcp_to_another_machine_is_refused(capsys, tmp_path):
    for text in ("tcp://127.0.0.1:1", "tcp://localhost:1", f"tcp://{socket.gethostname()}:1", "tls://192.0.2.7:1"):
        assert address.why_insecure(text) is None
    assert main(["build", "--cluster", "tcp://192.0.2.7:8786"]) == 2
    assert "--tls-ca-file" in (said := capsys.readouterr().err) and "--cluster-insecure" in said
    assert main(["build", "--cluster-wait", "3"]) == 2 and "only with --cluster" in capsys.readouterr().err
    assert main(["build", "--cluster-insecure"]) == 2


def test_nobody_answers(capsys, tmp_path):
    began = time.monotonic()
    arguments = [
        "--cluster",
        f"tcp://127.0.0.1:{free_port()}",
        "--cluster-wait",
        "1",
        "--out-dir",
        str(tmp_path / "out"),
    ]
    assert main(["build", "--families", "page", "--backend", "cpu", *arguments]) == 2
    assert "no scheduler answers at tcp://127.0.0.1" in capsys.readouterr().err and time.monotonic() - began < 300


def test_without_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["build", "--cluster", "tcp://127.0.0.1:1", "--out-dir", str(tmp_path / "out")]) == 1
    assert "pip install -e '.[cluster]'" in capsys.readouterr().err


@pytest.mark.parametrize("lie", ["key", "build_key", "library", "archs", "files", "seal"])
def test_results_of_workers_are_checked(lie, make_spec, tmp_path):
    from flashinfer.jit.cluster.client import publish_result

    spec = make_spec("one", answering(7))
    built = spec.build()
    request = make_request(spec, tmp_path / "out" / "one")
    manifest, library = dict(built.manifest), built.path.read_bytes()
    if lie == "library":
        library = library[:-1] + bytes([library[-1] ^ 1])
    elif lie == "seal":
        manifest["built"] += 1
    else:
        manifest = sealed({**manifest, lie: [] if lie == "archs" else {} if lie == "files" else "0" * 64})
    with pytest.raises(ArtifactError):
        publish_result(request, spec.fields(), manifest, library)
    assert not (tmp_path / "out" / "one").exists()
    assert answer(publish_result(request, spec.fields(), built.manifest, built.path.read_bytes())) == 7
