"""From a run to a package: trace records the requests of a program, build_aot.py builds exactly these."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.cli.main import main
from flashinfer.jit import JitSpec
from flashinfer.jit.modules.norm import gen_norm_module
from flashinfer.jit.resolve import look_up
from flashinfer.jit.specfile import RecordedSpec, merge, one_per_name, read_specs, write_specs
from flashinfer.jit.specjson import to_json

from ..support.processes import python_path
from .conftest import ROOT

PROGRAM = """
import os, signal, subprocess, sys
from flashinfer import jit
from flashinfer.jit.load import load

def ask(number):
    load(jit.gen_jit_spec("tiny", [sys.argv[1]], coverage={"dtype": ["float16", "bfloat16"]}), {"dtype": [number]})

if len(sys.argv) > 2:
    ask("bfloat16")
    os.kill(os.getpid(), signal.SIGKILL)
ask("float16")
child = subprocess.run([sys.executable, *sys.orig_argv[1:], "child"])
assert child.returncode == -9
sys.exit(7)
"""


@pytest.fixture
def process(monkeypatch):
    """Let programs find this package."""
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))


@pytest.fixture
def recorded(make_spec, tmp_path, process, monkeypatch):
    """Record a program with a child that is killed."""
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64-v2")
    spec = make_spec(coverage={"dtype": ["float16", "bfloat16"]})
    output = tmp_path / "specs.jsonl"
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["trace", "-o", str(output), "--", sys.executable, str(tmp_path / "program.py"), spec.sources[0]]
    assert main(arguments) == 7, "the program's own code"
    monkeypatch.delenv("FLASHINFER_CPU_ARCH")
    return spec, output


def test_a_program_and_its_children_are_recorded_and_merged(recorded):
    spec, output = recorded
    (line,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert line == {
        "spec": json.loads(json.dumps(to_json(spec))),
        "key": spec.key,
        "needs": {"dtype": ["bfloat16", "float16"]},
        "archs": ["x86-64-v2"],
    }
    assert stat.S_IMODE(output.stat().st_mode) == 0o644


def test_a_module_of_the_project_is_recorded_from_its_function(process, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-O0")  # compiles fast, and its speed does not matter
    program = "import torch, flashinfer; flashinfer.rmsnorm(torch.ones(2, 8), torch.ones(8))"
    assert main(["trace", "-o", str(tmp_path / "specs"), "--", sys.executable, "-c", program]) == 0
    (asked,) = read_specs(tmp_path / "specs", tmp_path)
    assert asked.spec == gen_norm_module("cpu") and asked.needs == {"dtype": ["float32"]}


def test_a_program_that_asks_for_nothing_gives_an_empty_file(tmp_path):
    assert main(["trace", "-o", str(tmp_path / "specs"), "--", "true"]) == 0
    assert (tmp_path / "specs").read_text() == ""


def test_signals_reach_the_program(tmp_path, process):
    """A signal to the command reaches the program, and the file is written."""
    assert main(["trace", "-o", str(tmp_path / "specs"), "--", "sh", "-c", "kill -9 $$"]) == 128 + 9
    command = [
        sys.executable,
        "-m",
        "flashinfer",
        "trace",
        "-o",
        str(tmp_path / "specs"),
        "--",
        "sh",
        "-c",
        "echo on; exec sleep 60",
    ]
    traced = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert traced.stdout.readline() == b"on\n"
    (tmp_path / "specs").unlink()
    traced.terminate()
    assert traced.wait(timeout=300) == 128 + 15 and (tmp_path / "specs").exists()
    traced.stdout.close()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-o", "/none/specs", "--", "true"], "/none is not a writable directory"),
        (["-o", "x", "--", "no-such-program"], "not an executable program"),
    ],
)
def test_bad_traces(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *arguments]) == 2
    assert message in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_needs_of_one_spec_add_up_and_an_axis_that_is_not_named_is_all_of_it(make_spec):
    spec, other = to_json(make_spec("one")), to_json(make_spec("two"))

    def line(spec, key="k", archs=(), **needs):
        return {"spec": spec, "key": key, "needs": needs, "archs": list(archs)}

    assert merge([line(spec, a=[1], b=[2]), line(spec, a=[3, 1])]) == [line(spec, a=[1, 3])]
    assert merge([line(spec, a=[1]), line(spec)]) == [line(spec)] == merge([line(spec), line(spec, a=[1])])
    assert merge([line(spec, archs=["9.0a"]), line(spec, archs=["8.0"])]) == [line(spec, archs=["8.0", "9.0a"])]
    lines = [line(other), line(spec, "k"), line(spec, "l")]
    assert merge(lines) == merge(lines[::-1]) and [one["spec"]["name"] for one in merge(lines)] == ["one", "one", "two"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "line 1: "),
        ("[]", "line 1: got another line"),
        ('{"spec": {}, "key": "", "needs": {}, "archs": []}', "wanted a spec"),
        ('{"spec": {"name": "a", "backend": "cpu"}, "key": 1, "needs": {}, "archs": []}', "key: got 1"),
        (
            '{"spec": {"name": "a", "backend": "cpu"}, "key": "", "needs": {"dtype": [1, "a"]}, "archs": []}',
            "needs: got",
        ),
        ('{"spec": {"name": "a", "backend": "cpu"}, "key": "", "needs": null, "archs": []}', "needs: got None"),
        ('{"spec": {"name": "a", "backend": "cpu"}, "key": "", "needs": {}, "archs": ["; rm"]}', "wanted CPU levels"),
        ('{"spec": {"name": "a", "backend": "cuda"}, "key": "", "needs": {}, "archs": ["sm_90"]}', "not an arch"),
        ('{"spec": {"name": "a", "backend": "cpu"}, "key": "", "needs": {}, "archs": []}', "spec: got"),
    ],
)
def test_bad_files_are_refused(text, message, tmp_path, capsys):
    (tmp_path / "specs").write_text(text + "\n")
    assert main(["verify", "--specs", str(tmp_path / "specs")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_others_can_write_or_that_is_missing_is_refused(make_spec, tmp_path, aot, capsys):
    output = write(tmp_path / "specs.jsonl", make_spec())
    output.chmod(0o666)
    assert main(["verify", "--specs", str(output)]) == 2
    assert "can be written by everybody" in capsys.readouterr().err
    assert aot.main(["--specs", str(output), "--out-dir", str(tmp_path / "out")]) == 2
    assert "can be written by everybody" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["verify", "--specs", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_module_unknown_to_this_version_is_reported(tmp_path, aot, capsys):
    value = to_json(gen_norm_module("cpu")) | {"sources": ["csrc/gone.cc"], "source_cflags": []}
    write_specs(tmp_path / "specs", [{"spec": value, "key": "", "needs": {}, "archs": []}])
    assert main(["verify", "--specs", str(tmp_path / "specs")]) == 2
    assert "norm_cpu: " in (err := capsys.readouterr().err) and "csrc/gone.cc" in err
    assert aot.main(["--specs", str(tmp_path / "specs"), "--out-dir", str(tmp_path / "out")]) == 2
    assert "csrc/gone.cc" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_recorded_modules_are_built_elsewhere_and_hit(
    recorded, aot, tmp_path, workspace, compilers_started, capsys, monkeypatch
):
    spec, output = recorded
    shutil.rmtree(workspace)
    os.rename(tmp_path / "src", tmp_path / "moved")  # the other machine lacks the user's files
    before = compilers_started()
    assert main(["verify", "--specs", str(output)]) == 1
    assert "1 of 1 modules would be compiled" in capsys.readouterr().err and not workspace.exists()
    image = tmp_path / "image"
    assert aot.main(["--specs", str(output), "--out-dir", str(image), "--json", str(tmp_path / "rows")]) == 0
    (row,) = json.loads((tmp_path / "rows").read_text())
    assert (row["name"], row["archs"], row["how"]) == ("tiny", ["x86-64-v2"], "built") and os.listdir(image) == ["tiny"]
    assert compilers_started() == before + 1
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(image))
    capsys.readouterr()
    shutil.rmtree(workspace)
    assert main(["verify", "--specs", str(output), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["state"] == "ready" and row["where"] == str(image / "tiny")
    os.rename(tmp_path / "moved", tmp_path / "src")
    assert look_up(spec).artifact.directory == image / "tiny" and not workspace.exists()
    assert main(["export", str(tmp_path / "modules.tar"), "--specs", str(output)]) == 0


def test_another_arch_is_built_when_it_is_named(make_spec, aot, tmp_path, capsys):
    output = write(tmp_path / "specs.jsonl", make_spec(), archs=["x86-64-v2"])
    for options, wanted in ((["--cpu-arch", "x86-64"], "x86-64"), ([], "x86-64-v2")):
        arguments = ["--specs", str(output), "--dry-run", "--out-dir", str(tmp_path / "out"), "--json"]
        assert aot.main([*arguments, *options]) == 0
        assert [row["archs"] for row in json.loads(capsys.readouterr().out)] == [[wanted]]
    assert aot.main([*arguments, "--backend", "cuda"]) == 0 and json.loads(capsys.readouterr().out) == []
    assert aot.main([*arguments, "--families", "norm"]) == 2
    assert "--specs: the file selects the modules" in capsys.readouterr().err


def write(path, *specs: JitSpec, archs=()) -> Path:
    write_specs(path, [{"spec": to_json(spec), "key": spec.key, "needs": {}, "archs": list(archs)} for spec in specs])
    return path


def test_two_modules_of_one_name_are_one_only_where_they_differ_in_coverage(make_spec, aot, tmp_path, capsys):
    narrow = [make_spec(coverage={"dtype": [dtype]}) for dtype in ("float16", "bfloat16")]
    (one,) = one_per_name(read_specs(write(tmp_path / "specs", *narrow), tmp_path / "own"))
    assert one.spec.coverage == (("dtype", ("bfloat16", "float16")),)
    first = make_spec(extra_cflags=["-DA"])
    write(tmp_path / "specs", first, narrow[0])
    assert aot.main(["--specs", str(tmp_path / "specs"), "--out-dir", str(tmp_path / "out")]) == 2
    assert "two modules are named 'tiny' and differ in cflags" in capsys.readouterr().err


def test_targets_of_a_spec(make_spec):
    def target(backend, *archs):
        return RecordedSpec(make_spec(backend=backend), {}, archs, "").target()

    assert target("cpu", "x86-64-v4", "x86-64-v2", "x86-64-v3").archs == ("x86-64-v2",)
    assert target("cpu", "generic").archs == ("generic",) and target("cpu") is None
    assert target("cuda", "8.0", "9.0a").archs == ("8.0", "9.0a") and target("cuda") is None
