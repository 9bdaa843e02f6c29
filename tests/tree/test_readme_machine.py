"""README's commands on a machine with Python and g++: no nvcc, no git, and ninja from its Python package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ..support.tree import ROOT, clean_environment, copy_tree

HIDDEN = ("nvcc", "git", "ninja")
# Fast tests that use these programs.
TESTS = ("tests/jit/test_toolchain.py", "tests/jit/test_ninja.py", "tests/tree/test_import.py")

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(not Path(sysconfig.get_path("scripts"), "ninja").exists(), reason="needs the package ninja"),
]


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose ``PATH`` lacks the hidden programs."""
    links = tmp_path / "bin"
    links.mkdir()
    for folder in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
        for program in os.scandir(folder):
            if program.name not in HIDDEN and not os.path.lexists(links / program.name):
                (links / program.name).symlink_to(Path(program.path).absolute())
    assert not any(shutil.which(name, path=str(links)) for name in HIDDEN) and shutil.which("g++", path=str(links))
    kept = clean_environment(PATH=links, FLASHINFER_WORKSPACE_DIR=tmp_path / "workspace")
    return {name: value for name, value in kept.items() if name not in ("CUDA_HOME", "CUDA_PATH")}


def test_modules_are_built_ahead_of_time(bare, tmp_path):
    tree = copy_tree(tmp_path / "tree")
    for words in (("--dry-run",), ("--families", "quantization", "--backend", "cpu")):
        command = [sys.executable, str(tree / "scripts" / "build_aot.py"), *words]
        done = subprocess.run(command, cwd=tree, env=bare, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert list((tree / "data" / "aot").rglob("quantization_cpu.so"))


def test_tests_pass(bare):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_every_test_is_found(bare):
    """A test file that needs a program at import time would stop the whole run."""
    folders = [f"tests/{name}" for name in ("jit", "cli", "hopper", "cpu", "attention")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--collect-only", *folders]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
