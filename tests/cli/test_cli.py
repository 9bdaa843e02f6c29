"""The command line, mostly in this process: ``main(arguments)`` returns the exit code and prints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashinfer import env
from flashinfer.cli import doctor
from flashinfer.cli.compile_commands import to_clang
from flashinfer.cli.main import COMMANDS, main
from flashinfer.cli.table import age, size
from flashinfer.jit.artifact import sealed
from flashinfer.jit.modules import Matrix, families, matrix_specs

from ..support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a workspace and an AOT directory for this test."""
    forget_settings(monkeypatch)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "workspace"))
    monkeypatch.setattr(env, "default_aot_dir", lambda: tmp_path / "aot")
    return tmp_path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a workspace into which the command line has built norm_cpu."""
    workspace = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        forget_settings(patch)
        patch.setenv("FLASHINFER_WORKSPACE_DIR", str(workspace))
        patch.setattr(env, "default_aot_dir", lambda: workspace / "no-aot")
        assert main(["build", "norm_cpu", "--json"]) == 0
    yield workspace


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs a command and returns its JSON, or its text with ``text``."""

    def call(*arguments: str, code: int = 0, text: bool = False) -> Any:
        capsys.readouterr()
        assert main([*arguments, *([] if text else ["--json"])]) == code
        out = capsys.readouterr().out
        return out if text else json.loads(out)

    return call


def artifact_of(workspace: Path) -> Path:
    (manifest,) = workspace.glob("artifacts/norm_cpu/*/*/manifest.json")
    return manifest.parent


@pytest.mark.parametrize("command", ["list", "doctor --config"])
def test_commands_that_need_no_torch_do_not_import_it(command, place):
    program = [sys.executable, "-X", "importtime", "-m", "flashinfer", *command.split()]
    done = subprocess.run(
        program, capture_output=True, text=True, cwd=place, env={**os.environ, "PYTHONPATH": python_path(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "flashinfer.cli.main" in imported
    assert not imported & {"torch", "jinja2", "rich", "filelock", "elftools"}
    assert not (place / "workspace").exists()


def test_list_names_every_module_of_the_matrix(run):
    rows, specs = run("list"), sorted(matrix_specs(Matrix()), key=lambda spec: spec.name)
    assert [(row["name"], row["key"]) for row in rows] == [(spec.name, spec.key) for spec in specs]
    assert all(any(spec.name.startswith(f"{name}_") for spec in specs) for name in families())
    text = run("list", text=True)
    assert all(spec.name in text for spec in specs)
    assert max(map(len, text.splitlines())) <= 100


def test_a_table_on_a_terminal_preserves_brackets(run, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "-DX=a[1]")
    monkeypatch.setenv("COLUMNS", "200")
    text = run("doctor", "--config", text=True)
    assert "-DX=a[1]" in text


def test_list_without_artifacts_shows_missing_modules(run):
    rows = run("list")
    assert {row["name"]: row["state"] for row in rows} == {spec.name: "missing" for spec in matrix_specs(Matrix())}


@needs_compiler
def test_list_shows_whether_a_load_uses_each_artifact(run, place, built, monkeypatch):
    workspace, aot = place / "workspace", place / "aot"
    shutil.copytree(built, workspace)
    name = "norm_cpu"

    def state() -> dict[str, tuple[str, str]]:
        rows = [row for row in run("list") if row["name"] in (name, "mine")]
        return {"missing" if row["where"] is None else row["where"]: (row["state"], row["why"]) for row in rows}

    mine = artifact_of(workspace)
    assert state() == {str(mine): ("ready", "")}
    assert "ready" in run("list", text=True)

    shutil.copytree(mine, aot / name)
    assert state() == {str(aot / name): ("ready", ""), str(mine): ("shadowed", "")}

    library = aot / name / f"{name}.so"
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    assert state()[str(aot / name)] == ("refused", f"{name}.so is damaged: its digest differs from the manifest")
    assert state()[str(mine)] == ("ready", "")

    library.write_bytes(content[:-1])
    assert state()[str(aot / name)][0] == "broken"

    manifest = json.loads((mine / "manifest.json").read_text())
    manifest["files"]["csrc/norm.cc"] = manifest["key"] = "0" * 64
    shutil.copyfile(mine / f"{name}.so", library)
    (aot / name / "manifest.json").write_text(json.dumps(sealed(manifest)))
    assert state()[str(aot / name)] == ("stale", "changed: csrc/norm.cc")

    shutil.rmtree(aot)
    shutil.copytree(mine, aot / "mine")
    (aot / "mine" / f"{name}.so").rename(aot / "mine" / "mine.so")
    (aot / "mine" / "manifest.json").write_text(json.dumps(sealed({**manifest, "name": "mine"})))
    assert state()[str(aot / "mine")] == ("other", "")


@needs_compiler
def test_build_reuses_and_reports(run, place, built):
    shutil.copytree(built, place / "workspace")
    (row,) = run("build", "norm_cpu")
    assert row["how"] == "ready" and Path(row["path"]).parent == artifact_of(place / "workspace")


@needs_compiler
def test_a_module_that_does_not_build_is_exit_code_1(run, monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", "--no-such-flag")
    assert main(["build", "norm_cpu"]) == 1
    out, err = capsys.readouterr()
    assert "failed" in out and "norm_cpu" in err and "--no-such-flag" in err


def test_unknown_names_are_exit_code_2_with_the_close_ones(capsys):
    assert main(["build", "norm_cp"]) == 2
    err = capsys.readouterr().err
    assert "there is no module 'norm_cp': did you mean norm_cpu" in err
    assert main(["build", "xyzzy"]) == 2
    assert "wanted one of" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["no-such-command"])
    assert caught.value.code == 2


def test_build_respects_disabled_jit(monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert main(["build", "norm_cpu"]) == 1
    assert "FLASHINFER_DISABLE_JIT" in capsys.readouterr().err


def test_doctor_shows_the_configuration(run, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a;8.0")
    monkeypatch.setenv("MAX_JOBS", "3")
    rows = {row["variable"]: row for row in run("doctor", "--config")}
    assert list(rows) == [variable.name for variable in env.VARIABLES]
    assert rows["FLASHINFER_CUDA_ARCH_LIST"]["value"] == ["8.0", "9.0a"] and rows["FLASHINFER_CUDA_ARCH_LIST"]["set"]
    assert rows["MAX_JOBS"]["value"] == 3 and not rows["CXX"]["set"]
    monkeypatch.setenv("MAX_JOBS", "many")
    text = run("doctor", "--config", code=2, text=True)
    assert "MAX_JOBS='many'" in text and "FLASHINFER_WORKSPACE_DIR" in text


def test_a_malformed_variable_ends_a_command_with_its_name(monkeypatch, capsys):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", "relative/path")
    assert main(["list"]) == 2
    assert "FLASHINFER_WORKSPACE_DIR" in capsys.readouterr().err


def test_every_command_is_in_the_help_and_the_docs(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    out = capsys.readouterr().out
    docs = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert caught.value.code == 0
    for name in COMMANDS:
        assert re.search(rf"^    {name}\b", out, re.MULTILINE), f"--help lacks {name}"
        assert f"flashinfer {name} " in docs or f"flashinfer {name}`" in docs, f"the docs lack {name}"
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0 and COMMANDS[name][1] in " ".join(capsys.readouterr().out.split())


@pytest.fixture
def used(place):
    """Make a workspace with two artifacts of 1,000 bytes, last used ten and twenty days ago."""
    for days, name in ((10, "new"), (20, "old")):
        directory = place / "workspace" / "artifacts" / name / "key" / "build"
        directory.mkdir(parents=True)
        (directory / f"{name}.so").write_bytes(b"x" * 998)
        (directory / "manifest.json").write_bytes(b"{}")
        os.utime(directory / "manifest.json", (time.time() - days * 86400,) * 2)
    return place / "workspace" / "artifacts"


def test_clean_lists_its_removals_and_then_removes(run, used, capsys):
    rows = run("clean", "--max-size", "1500")
    assert [(row["what"], row["fate"]) for row in rows] == [
        ("artifacts/old/key/build", "would be removed"), ("artifacts/new/key/build", "stays"),
    ]  # fmt: skip
    assert (
        rows[0]["kind"] == "artifact" and rows[0]["size"] == 1000 and rows[0]["why"] == "workspace over its size limit"
    )
    assert (used / "old" / "key" / "build").exists()
    text = run("clean", "--max-size", "1500", "--yes", text=True)
    assert "removed" in text and "20 d" in text
    assert not (used / "old" / "key" / "build").exists() and (used / "new" / "key" / "build").exists()


def test_clean_reads_its_size_from_the_environment(run, used, monkeypatch, capsys):
    assert {row["fate"] for row in run("clean", "--yes")} == {"stays"}
    monkeypatch.setenv("FLASHINFER_WORKSPACE_MAX_SIZE", "1500")
    os.utime(used / "old" / "key" / "build" / "manifest.json")
    os.utime(used / "new" / "key" / "build" / "manifest.json")
    rows = run("clean", "--yes", code=1)
    assert {(row["fate"], row["why"]) for row in rows} == {("stays", "just built or used")}
    with pytest.raises(SystemExit):
        main(["clean", "--max-size", "2X"])
    assert "'2X' is not a size" in capsys.readouterr().err


@needs_compiler
def test_doctor_on_this_machine(run, monkeypatch):
    findings = {row["check"]: row for row in run("doctor")}
    assert {"torch", "C++ compiler", "ninja", "nvcc", "GPU", "workspace", "CPU modules"} <= set(findings)
    assert findings["torch"]["state"] in ("ok", "note") and findings["CPU modules"]["state"] == "ok"
    assert all(row["state"] != "missing" for row in findings.values())


def test_doctor_without_a_compiler(run, place, monkeypatch):
    monkeypatch.setattr(doctor, "_torch", lambda: doctor.Finding("torch", "ok", "taken for granted"))
    monkeypatch.setenv("PATH", str(place))
    findings = {row["check"]: row for row in run("doctor", code=1)}
    assert findings["C++ compiler"]["state"] == "missing" and "apt install" in findings["C++ compiler"]["fix"]
    assert findings["CPU modules"]["state"] == "missing" and "C++ compiler" in findings["CPU modules"]["detail"]


@needs_compiler
def test_doctor_without_a_compiler_accepts_artifacts(run, place, built, monkeypatch):
    shutil.copytree(artifact_of(built), place / "aot" / "norm_cpu")
    monkeypatch.setattr(doctor, "_torch", lambda: doctor.Finding("torch", "ok", "taken for granted"))
    monkeypatch.setattr(doctor, "matrix_specs", lambda _: [s for s in matrix_specs(Matrix()) if s.name == "norm_cpu"])
    monkeypatch.setenv("PATH", str(place))
    findings = {row["check"]: row for row in run("doctor")}
    assert findings["C++ compiler"]["state"] == "missing" and findings["CPU modules"]["state"] == "ok"


def test_doctor_finds_a_compiler_that_cannot_compile(run, place, monkeypatch):
    compiler = place / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ (Some) 13.2.0" && exit\necho "error: no libstdc++" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(doctor, "_torch", lambda: doctor.Finding("torch", "ok", "taken for granted"))
    findings = {row["check"]: row for row in run("doctor", code=1)}
    assert "no libstdc++" in findings["C++ compiler"]["detail"]


def test_doctor_names_a_malformed_variable(run, monkeypatch):
    monkeypatch.setenv("FLASHINFER_JIT_DEBUG", "perhaps")
    (finding,) = run("doctor", code=1)
    assert "FLASHINFER_JIT_DEBUG" in finding["detail"] and finding["fix"] == "unset FLASHINFER_JIT_DEBUG"


def test_clean_removes_builds_only_with_yes(run, place):
    workspace = place / "workspace"
    (workspace / "artifacts" / "m").mkdir(parents=True)
    (workspace / "artifacts" / "m" / "file").write_bytes(b"x" * 2048)
    (workspace / "mine").mkdir()
    (row,) = run("clean", "--all")
    assert row == {"what": str(workspace / "artifacts"), "files": 1, "size": 2048, "removed": False}
    assert (workspace / "artifacts" / "m" / "file").exists()
    (row,) = run("clean", "--all", "--yes")
    assert row["removed"] and not (workspace / "artifacts").exists() and (workspace / "mine").exists()
    assert run("clean", "--all", "--yes") == []


@needs_compiler
def test_exported_commands_compile_sources_and_headers(run, place):
    output = place / "compile_commands.json"
    run("compile-commands", "--output", str(output))
    entries = {entry["file"]: entry for entry in json.loads(output.read_text())}
    for file in ("csrc/norm.cc", "csrc/norm_cpu.cc", "include/flashinfer/cpu/norm.h"):
        entry = entries[str(ROOT / file)]
        done = subprocess.run(
            [*entry["arguments"], "-fsyntax-only"], cwd=entry["directory"], capture_output=True, text=True
        )
        assert done.returncode == 0 and "error" not in done.stderr, done.stderr


@needs_nvcc
def test_exported_cuda_commands_are_clangs(run, place):
    output = place / "compile_commands.json"
    run("compile-commands", "--output", str(output))
    entries = {entry["file"]: entry for entry in json.loads(output.read_text())}
    words = entries[str(ROOT / "csrc" / "norm_cuda.cu")]["arguments"]
    assert words[0] == "clang++" and "--cuda-gpu-arch=sm_90a" in words
    cuda = next(word.removeprefix("--cuda-path=") for word in words if word.startswith("--cuda-path="))
    assert (Path(cuda) / "bin" / "nvcc").exists()
    assert "cuda" in entries[str(ROOT / "include" / "flashinfer" / "cuda" / "norm.cuh")]["arguments"]
    assert (Path(entries[str(ROOT / "csrc" / "norm_cuda.cu")]["directory"]) / "norm_cuda" / "norm_config.h").exists()


def test_commands_of_nvcc_in_clangs_form():
    nvcc = "nvcc -ccbin g++ -objtemp -MMD -MF a.d -O3 -gencode=arch=compute_90a,code=sm_90a -Xcompiler=-fPIC,-Wall -DX -c k.cu -o k.o"
    words = to_clang(nvcc.split(), "/cuda")
    assert words[:4] == ["clang++", "-x", "cuda", "--cuda-path=/cuda"]
    assert words[5:] == ["-O3", "--cuda-gpu-arch=sm_90a", "-fPIC", "-Wall", "-DX", "k.cu"]


def test_sizes_and_ages_read_well(monkeypatch):
    assert [size(n) for n in (None, 0, 1023, 2048, 5 << 20, 3 << 30)] == [
        "",
        "0 B",
        "1023 B",
        "2 KiB",
        "5 MiB",
        "3.0 GiB",
    ]
    monkeypatch.setattr("time.time", lambda: 1e6)
    assert [age(1e6 - s) for s in (-5, 59, 60, 7200, 200000)] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
    assert age(None) == ""
