"""verify: whether a program would compile, here or on a described machine, without compiling."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashinfer.cli.main import main
from flashinfer.jit import JitSpec
from flashinfer.jit.artifact import publish
from flashinfer.jit.modules.norm import gen_norm_module
from flashinfer.jit.specfile import write_specs
from flashinfer.jit.specjson import to_json


def write(path, *specs: JitSpec, archs=()) -> Path:
    write_specs(path, [{"spec": to_json(spec), "key": spec.key, "needs": {}, "archs": list(archs)} for spec in specs])
    return path


def shipped(spec: JitSpec, place: Path, **changes) -> None:
    """Make an artifact of ``spec`` in an AOT directory with a changed manifest."""
    built = spec.build()
    publish(built.path, {**built.manifest, **changes}, place / spec.name)


@pytest.fixture
def verdict(tmp_path, capsys):
    def call(specs, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["verify", "--specs", str(specs), "--json", *options])
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["state"] == "ready") == (code == 0)
        return code, row["why"]

    return call


def test_another_machines_cpu_is_verified_for(make_spec, tmp_path, verdict, monkeypatch):
    spec = make_spec()
    shipped(spec, tmp_path / "aot", archs=["x86-64-v3"])
    shutil.rmtree(tmp_path / "workspace")
    specs = write(tmp_path / "specs", spec)
    assert verdict(specs, "--cpu-arch", "x86-64-v3") == (0, "") == verdict(specs, "--cpu-arch", "x86-64-v4")
    code, why = verdict(specs, "--cpu-arch", "x86-64-v2")
    assert code == 1 and "compiled for x86-64-v3, the machine is x86-64-v2" in why
    assert main(["verify", "--specs", str(specs), "--cpu-arch", "i386"]) == 2
    # A machine with a requested level accepts only that level.
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64-v2")
    assert "wanted x86-64-v2" in verdict(specs, "--cpu-arch", "x86-64-v4")[1]


def test_another_machines_workspace_hits_only_for_its_own_level(make_spec, tmp_path, verdict, monkeypatch):
    spec = make_spec()
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64")
    spec.build()
    monkeypatch.delenv("FLASHINFER_CPU_ARCH")
    specs = write(tmp_path / "specs", spec)
    assert verdict(specs, "--cpu-arch", "x86-64") == (0, "")
    assert "another target" in verdict(specs, "--cpu-arch", "x86-64-v3")[1]


@pytest.mark.parametrize(
    "archs, gpus, ready",
    [
        (["9.0a"], "9.0", True),
        (["9.0a"], "9.0a", True),
        (["8.0"], "9.0", False),
        (["8.0+PTX"], "9.0a 8.0", True),
        (["8.0", "9.0a"], "8.6 9.0", True),
        (["8.0", "9.0a"], "8.6 10.0", False),
    ],
)
def test_gpus_that_are_not_here_are_verified_for(archs, gpus, ready, make_spec, tmp_path, verdict, monkeypatch):
    monkeypatch.setattr("flashinfer.jit.machine.target.visible_gpus", lambda: ())
    monkeypatch.setattr("flashinfer.cli.verify.visible_gpus", lambda: ())
    built, spec = make_spec().build(), make_spec(backend="cuda")
    shipped_manifest = {**built.manifest, **spec.fields(), "key": spec.key, "archs": archs}
    publish(built.path, shipped_manifest, tmp_path / "aot" / "tiny")
    assert (verdict(write(tmp_path / "specs", spec), "--cuda-arch", gpus)[0] == 0) == ready
    # Without named archs, the recorded ones count.
    assert (verdict(write(tmp_path / "specs", spec, archs=gpus.split()))[0] == 0) == ready


def test_needs_decide_whether_a_narrower_module_serves(make_spec, tmp_path, verdict):
    wide = make_spec(coverage={"dtype": ["float16", "bfloat16"]})
    shipped(wide.covering({"dtype": ["float16"]}), tmp_path / "aot")
    for needs, code in (({"dtype": ["float16"]}, 0), ({"dtype": ["bfloat16"]}, 1), ({}, 1)):
        line = {"spec": to_json(wide), "key": wide.key, "needs": needs, "archs": []}
        write_specs(tmp_path / "specs", [line])
        assert verdict(tmp_path / "specs")[0] == code


def test_other_sources_than_recorded_are_reported(make_spec, tmp_path, verdict):
    spec = make_spec()
    line = {"spec": to_json(spec), "key": "0" * 64, "needs": {}, "archs": []}
    write_specs(tmp_path / "specs", [line])
    assert verdict(tmp_path / "specs")[1].endswith("it was recorded with other sources than those here")


def test_modules_for_other_archs_are_not_missing(make_spec, monkeypatch, capsys):
    """A program on a GPU of 8.0 never loads a module of kernels for 9.0a."""
    spec = replace(make_spec(backend="cuda"), archs=("9.0a",))
    monkeypatch.setattr("flashinfer.cli.verify.matrix_specs", lambda _: [spec])
    for gpus, code, count in (("8.0", 0, 0), ("9.0", 1, 1), ("8.0 9.0", 1, 1)):
        assert main(["verify", "--json", "--cuda-arch", gpus]) == code
        assert len(json.loads(capsys.readouterr().out)) == count


def test_without_a_file_the_matrix_is_verified(capsys, monkeypatch):
    monkeypatch.setattr("flashinfer.cli.verify.matrix_specs", lambda _: [gen_norm_module("cpu")])
    assert main(["verify"]) == 1
    out, err = capsys.readouterr()
    assert "norm_cpu" in out and "missing" in out and "1 of 1 modules would be compiled" in err
