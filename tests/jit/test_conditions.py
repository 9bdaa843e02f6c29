"""Real builds in processes without standard error, a home, a temporary directory or a user map.

Each condition has one run of ``fault_run.py``. Without root, a home and a temporary directory are missing only
for Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..support.processes import ROOT, answering, python_path
from ..support.users import can

FUTURE = "from __future__ import annotations"  # has to be the first statement
NOBODY = 54321  # a user without an account
PROGRAM = Path(__file__).with_name("fault_run.py")
NO_ACCOUNT = "import pwd\npwd.getpwuid = {}.__getitem__"
NO_TEMPORARY = "import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/nowhere']"


def root_can(*command: str) -> bool:
    return os.geteuid() == 0 and can(*command)


@pytest.fixture
def after(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that makes a copy of ``fault_run.py`` with statements before it."""

    def make(statements: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(f"{statements}\n{PROGRAM.read_text()}".replace(FUTURE, ""))
        return path

    return make


@pytest.fixture
def fault_run(tmp_path: Path, make_spec: Callable) -> Callable[..., None]:
    """Return a function that runs the builds of ``fault_run.py`` after a shell command ``prepare``.

    ``variables`` of ``None`` are unset.
    """

    def run(
        prepare: str = "",
        outer: Sequence[str] = (),
        program: Path = PROGRAM,
        python: str = sys.executable,
        **variables: str | None,
    ) -> None:
        rendered = '#include "other_config.h"\n#ifndef FLASHINFER_NAMESPACE\n#endif\n'
        files = [answering(1), {"unit.cc": rendered + answering(3)["unit.cc"]}, {"unit.cc": "no C++\n"}]
        sources = [make_spec(f"source{number}", one).source_paths()[0] for number, one in enumerate(files)]
        (tmp_path / "result").touch()
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
        environment = {name: value for name, value in environment.items() if value is not None}
        command = [*outer, "sh", "-c", f'{prepare}\nexec "$@"', "sh", python, program, tmp_path / "result"]
        done = subprocess.run([*command, *sources], env=environment, cwd=tmp_path, timeout=300, capture_output=True)
        assert (tmp_path / "result").read_text() == "done\n", done
        assert done.returncode == 0, done

    return run


@pytest.mark.slow
def test_standard_error_is_closed(fault_run):
    fault_run("exec 2>&-")


def test_all_standard_streams_are_closed(fault_run):
    """The first opened files get the descriptors of the standard streams."""
    fault_run("exec 0<&- 1>&- 2>&-")


@pytest.mark.parametrize("executable", [None, pytest.param("", marks=pytest.mark.slow)])
def test_an_interpreter_that_does_not_know_its_program(executable, fault_run, after):
    fault_run(program=after(f"import sys\nsys.executable = {executable!r}"))


EMBEDDING = """
#include <Python.h>
int main(int argc, char** argv) {
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  config.parse_argv = 0;
  PyConfig_SetBytesString(&config, &config.program_name, argv[0]);
  PyConfig_SetBytesArgv(&config, argc - 1, argv + 1);
  PyStatus status = Py_InitializeFromConfig(&config);
  if (PyStatus_Exception(status)) Py_ExitStatusException(status);
  FILE* file = fopen(argv[1], "r");
  int code = file ? PyRun_SimpleFile(file, argv[1]) : 1;
  return Py_FinalizeEx() ? 1 : code;
}
"""


@pytest.mark.skipif(not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="there is no shared library of Python")
def test_an_interpreter_inside_another_program(fault_run, tmp_path):
    """``sys.executable`` is the program, which does not take Python's options."""
    (tmp_path / "main.cc").write_text(EMBEDDING)
    place, version = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDVERSION")
    options = [f"-I{sysconfig.get_path('include')}", f"-L{place}", f"-lpython{version}", f"-Wl,-rpath,{place}"]
    server = tmp_path / "python-server"
    subprocess.run(["g++", tmp_path / "main.cc", "-o", server, *options], check=True)
    path = python_path(ROOT, *(one for one in sys.path if "site-packages" in one))
    fault_run(python=str(server), PYTHONHOME=sys.base_prefix, PYTHONPATH=path)


@pytest.mark.parametrize("name", ["code", pytest.param("cmd", marks=pytest.mark.slow)])
def test_a_program_named_like_a_standard_module(name, fault_run, tmp_path):
    """``pdb`` imports ``code`` and ``cmd``, and would import the program instead, which would start again."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / f"{name}.py").write_text(PROGRAM.read_text().replace('if __name__ == "__main__":', "if True:"))
    fault_run(program=folder / f"{name}.py")


def test_a_namespace_of_users_without_root(fault_run):
    """All files of root, and this process, belong to the overflow user."""
    if not root_can("unshare", "-U"):
        pytest.skip("takes root, and a namespace of users")
    fault_run(outer=["unshare", "-U"], CXX=shutil.which("g++"))


@pytest.mark.slow
def test_no_home(fault_run, after):
    """Without a variable and an account, modules go to a temporary directory."""
    nobody = ["unshare", "-U", f"--map-user={NOBODY}"]
    how = {"outer": nobody} if root_can(*nobody) else {"program": after(NO_ACCOUNT)}
    fault_run(**how, HOME=None, FLASHINFER_WORKSPACE_DIR=None)


def test_no_temporary_directory(fault_run, after):
    variables = {"TMPDIR": "/nowhere", "FLASHINFER_RUNTIME_DIR": None, "XDG_RUNTIME_DIR": None}
    if not root_can("unshare", "-m"):
        fault_run(program=after(NO_TEMPORARY), **variables)
        return
    read_only = "mount --bind $place $place && mount -o remount,bind,ro $place"
    prepare = f"for place in /tmp /var/tmp; do {read_only} || exit 1; done; mount --bind $PWD $PWD; mount -o remount,bind,rw $PWD; cd /proc; ! mktemp || exit 1"
    fault_run(prepare, outer=["unshare", "-m"], **variables)
