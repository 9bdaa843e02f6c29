"""Tests of builds in unusual environments, each in a run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.processes import ROOT, python_path
from ..support.users import can

# Builds, hits, compile and link errors, several modules in one run. pytest refuses a name that no test has.
TESTS = [
    "test_build.py::test_a_compile_error",
    "test_build.py::test_a_link_error",
    "test_build.py::test_one_broken_module_does_not_stop_the_others",
    "test_faults.py::test_many_processes_without_locks",
    "test_faults.py::test_no_directory_for_locks",
]
RUN = """
import sys, pytest
options = ["-q", "-s", "-p", "no:cacheprovider", "-n", "0", "--basetemp", sys.argv[1]]
sys.exit(pytest.main([*options, *(f"tests/jit/{name}" for name in sys.argv[2:])]))
"""
NO_ACCOUNT = "import pwd\npwd.getpwuid = {}.__getitem__\n"
NO_TEMPORARY = "import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/nowhere']\n"


def run(program: str, tmp_path: Path, *before: str, **variables: str | None) -> None:
    given = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
    environment = {name: value for name, value in given.items() if value is not None and "PYTEST" not in name}
    command = [*before, sys.executable, "-c", program + RUN, str(tmp_path / "base"), *TESTS]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr


def test_without_a_home(tmp_path):
    run(NO_ACCOUNT, tmp_path, HOME=None)


def test_without_a_temporary_directory(tmp_path):
    """pytest gets the directory of a test's own files by an option."""
    torch = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    own = f"import tempfile\nmake = tempfile.mkdtemp\ntempfile.mkdtemp = lambda *a, **k: make(*a, **dict({{'dir': {str(tmp_path)!r}}}, **k))\n"
    run(NO_TEMPORARY + own, tmp_path, TMPDIR="/proc/nowhere", XDG_RUNTIME_DIR=None, **torch)


@pytest.mark.skipif(not can("unshare", "-U"), reason="this kernel gives no user namespace")
def test_in_a_user_namespace_without_root(tmp_path):
    run("", tmp_path, "unshare", "-U")
