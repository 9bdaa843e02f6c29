"""Fixtures: a workspace per test without prebuilt modules, and small sources that compile fast."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from flashinfer import env
from flashinfer.cli.main import main
from flashinfer.jit import JitSpec, gen_jit_spec
from flashinfer.jit.remote import transfer, transport
from flashinfer.jit.remote.signing import keygen

from ..support.object_store import ObjectStore, serving
from ..support.processes import answering, python_path
from ..support.stores import Host

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "workspace"))
    monkeypatch.setenv("FLASHINFER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr("flashinfer.env.default_aot_dir", lambda: tmp_path / "aot")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # tests need no protection from a power failure
    return tmp_path / "workspace"


@pytest.fixture(scope="session")
def light_gcc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a ``g++`` that links no library of torch.

    Small modules need none, and linking takes two thirds of their build time.
    """
    folder, real = tmp_path_factory.mktemp("light"), shutil.which("g++")
    if real is not None:
        without = 'for word; do shift; test "$word" = -ltorch_cpu || set -- "$@" "$word"; done'
        (folder / "g++").write_text(f'#!/bin/sh\n{without}\nexec {real} "$@"\n')
        (folder / "g++").chmod(0o755)
    return folder


@pytest.fixture
def make_spec(tmp_path: Path, light_gcc: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JitSpec]:
    """Return a function that writes files (name -> text) into a folder and describes them as a module."""
    monkeypatch.setenv("PATH", str(light_gcc), prepend=os.pathsep)

    def make(name: str = "tiny", files: dict[str, str] | None = None, **options: object) -> JitSpec:
        folder = tmp_path / "src" / name
        files = files or {
            "unit.cc": '#include "unit.h"\nextern "C" int answer() { return ANSWER; }\n',
            "unit.h": "#define ANSWER 42\n",
        }
        for file, text in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        sources = [folder / file for file in files if file.endswith((".cc", ".cu"))]
        return gen_jit_spec(name, sources, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def compilers_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count compilers by a launcher, which is not part of a module's identity."""
    log = tmp_path / "compilers"
    launcher = tmp_path / "count"
    launcher.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    monkeypatch.setenv("FLASHINFER_NVCC_LAUNCHER", str(launcher))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def python(tmp_path: Path, workspace: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a program in a process of its own, with this test's workspace."""

    def run(
        program: str, *arguments: str, check: bool = True, **variables: str | None
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(ROOT),
            **{k: v for k, v in variables.items() if v is not None},
        }
        for name, value in variables.items():
            if value is None:
                environment.pop(name, None)
        command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
        assert not check or result.returncode == 0, result.stdout + result.stderr
        return result

    return run


@pytest.fixture
def load_script() -> Callable[[str], ModuleType]:
    """Return a function that imports a file of scripts/, so that a test can set the modules it builds."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def aot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of builds ahead of time, so that a test can give it small modules to build."""
    module = importlib.import_module("flashinfer.cli.aot")
    monkeypatch.setattr(module, "main", lambda arguments: main(["build", *arguments]), raising=False)
    return module


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """Start an object store, and reset what this process knows about stores."""
    monkeypatch.setattr(transfer, "_stores", {})
    monkeypatch.setattr(transport, "PAUSES", (0.01, 0.02))
    with serving() as store:
        yield store


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a signing key that is both trusted and used."""
    private, public = tmp_path / "private.pem", tmp_path / "keys"
    public.write_text(f"# ours\n{keygen(private)} of this test\n")
    public.chmod(0o644)
    monkeypatch.setenv("FLASHINFER_STORE_KEYS", str(public))
    monkeypatch.setenv("FLASHINFER_STORE_SIGNING_KEY", str(private))
    return public


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


@pytest.fixture
def pushed(make_spec: Callable[..., JitSpec], remote: ObjectStore, keys: Path, host: Host) -> JitSpec:
    """Return a module that was built on host ``a`` and published."""
    spec = make_spec("tiny", answering(7))
    host("a", f"{remote.url}/bucket/prefix", publish=True)
    spec.build()
    return spec
