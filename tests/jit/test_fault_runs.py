"""The suite's build tests in processes whose surroundings lack something, each in a run of its own.

test_conditions.py has one small program for each of these, in every run. These runs are for CI.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.processes import ROOT, python_path
from ..support.users import can

pytestmark = pytest.mark.slow

# Builds, hits, errors, processes and threads. pytest refuses a name that no test has.
TESTS = [
    f"tests/jit/test_build.py::{name}"
    for name in (
        "test_a_built_module_is_never_built_again", "test_a_compile_error", "test_a_link_error",
        "test_one_broken_module_does_not_stop_the_others", "test_eight_threads_build_one_module",
        "test_four_processes_build_one_module", "test_an_interrupted_build_resumes", "test_events", "test_load",
    )
]  # fmt: skip
PROGRAM = """
import sys
{before}
if __name__ == "__main__":
    import pytest
    options = ["-qs", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-n", "0", "--basetemp", sys.argv[1]]
    sys.exit(pytest.main([*options, *sys.argv[2:]]))
"""
NO_ACCOUNT = "import pwd; pwd.getpwuid = {}.__getitem__"
# pytest makes directories of its own by mkdtemp(), in the test's directory.
NO_TEMPORARY = """
import tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/nowhere"]
make = tempfile.mkdtemp
tempfile.mkdtemp = lambda suffix=None, prefix=None, dir=None: make(suffix, prefix, dir or sys.argv[1] + "-of-pytest")
"""


def run(
    folder: Path, before: str = "", name: str = "program", prepare: str = "", outer: str = "", **variables: str | None
) -> None:
    program = folder / "bin" / f"{name}.py"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(before=before))
    (folder / "base-of-pytest").mkdir()
    given = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
    environment = {key: value for key, value in given.items() if value is not None and "PYTEST" not in key}
    command = shlex.join([sys.executable, str(program), str(folder / "base"), *TESTS])
    result = subprocess.run(
        f"{prepare}\nexec {outer} {command} > {folder}/output", shell=True, env=environment, cwd=ROOT, timeout=500
    )
    output = (folder / "output").read_text()
    assert result.returncode == 0 and f"{len(TESTS)} passed" in output, output


def test_standard_error_is_closed(tmp_path):
    run(tmp_path, prepare="exec 2>&-")


def test_no_home(tmp_path):
    run(tmp_path, NO_ACCOUNT, HOME=None)


def test_no_temporary_directory(tmp_path):
    torch = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    run(tmp_path, NO_TEMPORARY, TMPDIR="/proc/nowhere", XDG_RUNTIME_DIR=None, **torch)


@pytest.mark.skipif(not can("unshare", "-U"), reason="this kernel gives no user namespace")
def test_a_user_namespace_without_root(tmp_path):
    run(tmp_path, outer="unshare -U")


def test_a_program_named_code(tmp_path):
    run(tmp_path, name="code")
