"""No home, no temporary directory, noexec mounts, user namespaces, umasks: right, or a typed error.

Programs run in processes of their own, as other users and in namespaces of the kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flashinfer import env
from flashinfer.errors import EnvironmentValueError, ModuleLoadError, ToolchainError
from flashinfer.jit import gen_jit_spec
from flashinfer.jit.lock import runtime_directory
from flashinfer.jit.machine import toolchain, trust
from flashinfer.jit.machine.workspace import is_noexec, roots
from flashinfer.jit.machine.workspace import workspace as get_workspace
from flashinfer.jit.resolve import look_up

from ..support.processes import ROOT, answer, answering, python_path
from ..support.users import SOMEBODY, as_somebody, can, open_to_all
from .test_faults import BUILD, in_a_mount, needs_mounts

AS_SOMEBODY = as_somebody() or ()
needs_users = pytest.mark.skipif(not AS_SOMEBODY, reason="becoming another user takes root, setpriv(1) and unshare(1)")
needs_namespaces = pytest.mark.skipif(not can("unshare", "-U"), reason="this kernel gives no user namespace")


def run(
    program: str, *arguments: object, before: tuple[str, ...] = (), **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a program after other commands, with variables set or (``None``) unset."""
    given = {**os.environ, "PYTHONPATH": python_path(ROOT), **variables}
    environment = {name: value for name, value in given.items() if value is not None}
    command = [*before, sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=300)


def built(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the path and the answer of the module that a program built."""
    assert result.returncode == 0, result.stdout + result.stderr
    word, *rest = result.stdout.split()
    assert word == "built", result.stdout + result.stderr
    return rest


@pytest.fixture
def of_everybody(tmp_path, light_gcc, monkeypatch):
    """Make a source that every user can read, and a folder that belongs to another user."""
    monkeypatch.setenv("PATH", str(open_to_all(light_gcc)), prepend=os.pathsep)
    source = open_to_all(tmp_path / "src") / "unit.cc"
    source.write_text(answering(33)["unit.cc"])
    source.chmod(0o644)
    mine = open_to_all(tmp_path / "somebody")
    if os.geteuid() == 0:
        os.chown(mine, SOMEBODY, SOMEBODY)
    return source, mine


# No home


@pytest.fixture
def without_home(monkeypatch):
    """Simulate a user without an account and without HOME."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("FLASHINFER_WORKSPACE_DIR")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])


@pytest.mark.parametrize("workspace_dir", [None, "~/x", "~no-such-user/x"])
def test_without_a_home_the_workspace_is_one_that_cannot_be_used(
    workspace_dir, without_home, make_spec, aot, tmp_path, monkeypatch
):
    """A build goes to the fallback with a warning. A prebuilt module is found without one."""
    if workspace_dir is not None:
        monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", workspace_dir)
    spec = make_spec("tiny", answering(31))
    with pytest.warns(UserWarning, match=r"home directory is not known\): modules .* FLASHINFER_WORKSPACE_DIR"):
        assert answer(spec.build()) == 31
    found = look_up(spec).artifact
    shutil.copytree(found.directory, tmp_path / "aot" / "tiny")
    assert look_up(spec).artifact.directory == tmp_path / "aot" / "tiny"
    assert len(roots()) == 2 and get_workspace() == roots()[1]


def test_a_base_of_the_workspace_in_an_unknown_home(without_home, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "~no-such-user")
    assert env.WORKSPACE_DIR.get().is_relative_to(env.NO_HOME)
    assert env.FLASHINFER_BASE_DIR.is_relative_to(env.NO_HOME)
    monkeypatch.delenv("FLASHINFER_WORKSPACE_BASE")
    assert env.FLASHINFER_BASE_DIR == env.NO_HOME
    monkeypatch.setenv("HOME", "relative")
    assert env.home() == env.NO_HOME


PATHS = ["RUNTIME_DIR", "AOT_DIR", "CUDA_HOME", "JIT_EVENTS", "JIT_TRACE", "STORE_KEYS", "STORE_SIGNING_KEY"]


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("value", ["~/x", "~no-such-user/x"])
def test_other_paths_in_an_unknown_home_name_their_variable(name, value, without_home, monkeypatch):
    variable = getattr(env, name)
    monkeypatch.setenv(variable.name, value)
    with pytest.raises(EnvironmentValueError, match=rf"{variable.name}=.*home directory of {value[:-2]} is not known"):
        variable.get()


@needs_users
def test_a_user_without_a_home(of_everybody, tmp_path):
    source, _ = of_everybody
    result = run(
        BUILD, source, before=AS_SOMEBODY, HOME=None, FLASHINFER_WORKSPACE_DIR=None, FLASHINFER_RUNTIME_DIR=None
    )
    assert built(result)[1] == "33" and "home directory is not known" in result.stderr


COMMANDS = """
import contextlib, io, json, sys
from flashinfer.cli.main import main
outputs = []
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main([*command.split(), "--json"])
    assert code in (0, 1), (command, code)
    outputs.append(said.getvalue())
print(json.dumps(outputs))
"""


def outputs_of(before: str, *commands: str, **variables: str | None) -> list[str]:
    """Run commands in one process after ``before``, and return what each of them prints."""
    result = run(before + COMMANDS, *commands, **variables)
    assert "Traceback" not in result.stderr and result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("workspace_dir", [None, "~no-such-user/x"])
def test_commands_without_a_home(workspace_dir):
    before, commands = "import pwd; pwd.getpwuid = {}.__getitem__\n", ("doctor", "list", "clean", "doctor --config")
    checks, *_ = outputs_of(before, *commands, HOME=None, FLASHINFER_WORKSPACE_DIR=workspace_dir)
    (row,) = [row for row in json.loads(checks) if row["check"] == "workspace"]
    assert row["state"] == "note" and "home directory is not known" in row["detail"]


# No temporary directory

NO_TEMPORARY = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc/nowhere']\n"


def test_without_a_temporary_directory_a_workspace_is_enough(make_spec, tmp_path, workspace):
    """The compilers' temporary files are next to their outputs."""
    seen = tmp_path / "seen"
    launcher = tmp_path / "launcher"
    launcher.write_text(f'#!/bin/sh\necho "$TMPDIR" > {seen}\nexec "$@"\n')
    launcher.chmod(0o755)
    source = make_spec("tiny", answering(32)).source_paths()[0]
    result = run(NO_TEMPORARY + textwrap.dedent(BUILD), source, TMPDIR="/proc/nowhere", FLASHINFER_RUNTIME_DIR=None,
                 FLASHINFER_CXX_LAUNCHER=str(launcher))  # fmt: skip
    path, number = built(result)
    assert path.startswith(str(workspace)) and number == "32"
    assert Path(seen.read_text().strip()).is_relative_to(workspace / "build")


def test_without_a_temporary_directory_the_session_directory_is_the_fallback(make_spec, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "session").mkdir()
    source = make_spec("tiny", answering(34)).source_paths()[0]
    result = run(NO_TEMPORARY + textwrap.dedent(BUILD), source, FLASHINFER_WORKSPACE_DIR=f"{tmp_path}/file/x",
                 XDG_RUNTIME_DIR=f"{tmp_path}/session", FLASHINFER_RUNTIME_DIR=None)  # fmt: skip
    path, number = built(result)
    assert (
        path.startswith(f"{tmp_path}/session/flashinfer-") and number == "34" and "cannot be written" in result.stderr
    )


def test_a_directory_for_locks_is_looked_for_only_as_far_as_needed(tmp_path, monkeypatch):
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert runtime_directory().parent == tmp_path / "runtime"
    monkeypatch.delenv("FLASHINFER_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    assert runtime_directory().parent == tmp_path / "session"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    place = runtime_directory()
    assert place is None or place.parent == Path("/dev/shm")


@needs_mounts
def test_a_root_that_is_read_only(make_spec, workspace, tmp_path):
    """As in a Kubernetes container with readOnlyRootFilesystem: only one volume can be written."""
    source = make_spec("tiny", answering(35)).source_paths()[0]
    script = """
        mount -t tmpfs tmpfs /mnt
        for at in /tmp /var/tmp /dev/shm; do mount --bind $at $at; mount -o remount,ro,bind $at; done
        cd /proc; exec "$@"
    """  # Python would take the current directory
    before = ("unshare", "-m", "sh", "-c", script, "sh")
    result = run(BUILD, source, before=before, FLASHINFER_WORKSPACE_DIR="/mnt/workspace",
                 FLASHINFER_RUNTIME_DIR=None, XDG_RUNTIME_DIR=None, TMPDIR=None)  # fmt: skip
    path, number = built(result)
    assert path.startswith("/mnt/workspace/") and number == "35"


def test_commands_without_a_temporary_directory(workspace):
    *_, checks = outputs_of(NO_TEMPORARY, "verify", "why page_cpu", "doctor", TMPDIR="/proc/nowhere")
    (row,) = [row for row in json.loads(checks) if row["check"] == "C++ compiler"]
    assert row["state"] == "ok"


# noexec


@needs_mounts
def test_a_workspace_mounted_noexec(make_spec, workspace):
    """The build goes to the fallback, and the warning names noexec and the variable."""
    source = make_spec("tiny", answering(36)).source_paths()[0]
    (line,), said = in_a_mount(workspace, "size=8m,noexec", "true", BUILD, source)
    assert not line.startswith(f"built {workspace}") and line.endswith(" 36")
    assert "mounted noexec" in said and "set FLASHINFER_WORKSPACE_DIR" in said


@needs_mounts
def test_neither_the_workspace_nor_a_temporary_directory_can_hold_libraries(make_spec, workspace):
    source = make_spec("tiny", answering(37)).source_paths()[0]
    program = (
        f"import tempfile; tempfile.tempdir = {str(workspace)!r}; import os; os.environ.pop('XDG_RUNTIME_DIR', 0)\n"
    )
    (line,), _ = in_a_mount(workspace, "size=8m,noexec", "true", program + textwrap.dedent(BUILD), source)
    assert line.startswith("refused WorkspaceError") and "mounted noexec" in line and "FLASHINFER_WORKSPACE_DIR" in line


@needs_mounts
def test_artifacts_of_a_workspace_mounted_noexec_are_skipped(make_spec, tmp_path, workspace):
    spec = make_spec("tiny", answering(38))
    spec.build()
    os.rename(workspace, tmp_path / "saved")
    program = """
        from flashinfer.jit import gen_jit_spec
        from flashinfer.jit.resolve import look_up
        import sys
        print(look_up(gen_jit_spec("tiny", [sys.argv[1]])).reason)
    """
    prepare = f"cp -a {tmp_path}/saved/. ."
    (line,), _ = in_a_mount(workspace, "size=8m,noexec", prepare, program, spec.source_paths()[0])
    assert "mounted noexec" in line


@needs_mounts
def test_doctor_looks_for_noexec(tmp_path):
    variables = ["FLASHINFER_WORKSPACE_DIR", "FLASHINFER_AOT_DIR"]
    program = f"""
        import os, sys
        os.environ.update(dict.fromkeys({variables}, sys.argv[1]))
        from flashinfer.cli.main import main
        main(["doctor", "--json"])
    """
    lines, _ = in_a_mount(tmp_path / "mounted", "size=1m,noexec", "true", program, str(tmp_path / "mounted"))
    rows = [row for row in json.loads("\n".join(lines)) if "mounted noexec," in row["detail"]]
    assert len(rows) == 2 and {row["state"] for row in rows} == {"note"}
    assert all(sum(variable in row["fix"] for row in rows) == 1 for variable in variables)


def test_a_library_that_does_not_load_names_noexec(make_spec, monkeypatch):
    spec = make_spec("tiny", answering(39))
    spec.build()
    assert not is_noexec(spec.build().path)

    def refused(*_: object) -> None:
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr("ctypes.CDLL", refused)
    monkeypatch.setattr("flashinfer.jit.load.is_noexec", lambda path: True)
    with pytest.raises(ModuleLoadError, match=r"mounted noexec.*set FLASHINFER_WORKSPACE_DIR"):
        spec.build_and_load()


# User namespaces

LOOK = """
    import sys
    sys.path.insert(0, sys.argv.pop(1))
    from flashinfer.jit.machine import toolchain, trust
    for path in sys.argv[1:]:
        print(trust.refusal(path))
    print(toolchain.find_cxx())
    print(toolchain.find_nvcc())
"""


@pytest.fixture
def package_of_somebody(tmp_path):
    """Copy the package for the other user: its owner is not root, whose files show the overflow uid there."""
    package = open_to_all(tmp_path / "package")
    for folder in ("flashinfer", "csrc", "include"):
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [package, *package.rglob("*")] if AS_SOMEBODY else []:
        os.chown(path, SOMEBODY, SOMEBODY)
    return package


@needs_namespaces
@pytest.mark.parametrize("flags", ["-U", "-Ur"])
def test_the_machines_compilers_in_a_user_namespace(flags, package_of_somebody, tmp_path):
    """Root's files show the overflow uid there. Files that others can write are refused nevertheless."""
    before = (*AS_SOMEBODY, "unshare", flags)
    open_file = open_to_all(tmp_path / "open") / "file"
    open_file.touch()
    open_file.chmod(0o666)
    compiler = os.path.realpath(shutil.which("g++", path="/usr/bin:/bin") or toolchain.find_cxx())
    nvcc = open_to_all(tmp_path / "cuda" / "bin") / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    result = run(
        LOOK, package_of_somebody, os.path.dirname(compiler), open_file, before=before, CXX=compiler,
        CUDA_HOME=str(tmp_path / "cuda"), FLASHINFER_NVCC=None,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, second, *found = result.stdout.splitlines()
    assert first == "None" and found == [compiler, str(nvcc)] and "can be written by everybody" in second


@needs_namespaces
@needs_users
@pytest.mark.parametrize("flags", ["-U", "-Ur"])
@pytest.mark.parametrize("prebuilt", [False, True], ids=["built", "prebuilt"])
def test_a_build_in_a_user_namespace(prebuilt, flags, of_everybody, package_of_somebody, tmp_path):
    """Build with a named compiler into this user's workspace, or find the module in root's AOT directory."""
    source, mine = of_everybody
    aot = open_to_all(tmp_path / "aot")
    if prebuilt:
        shutil.copytree(gen_jit_spec("tiny", [source]).build().directory, aot / "tiny")
        for path in aot.rglob("*"):
            path.chmod(0o755)
    program = f"import sys\nsys.path.insert(0, {str(package_of_somebody)!r})\n" + textwrap.dedent(BUILD)
    result = run(
        program, source, before=(*AS_SOMEBODY, "unshare", flags), CXX=shutil.which("g++"), FLASHINFER_AOT_DIR=str(aot),
        FLASHINFER_WORKSPACE_DIR=f"{mine}/workspace", FLASHINFER_RUNTIME_DIR=f"{mine}/runtime",
    )  # fmt: skip
    path, number = built(result)
    assert path.startswith(str(aot if prebuilt else mine)) and number == "33" and "belongs to" not in result.stderr


def test_the_owner_of_the_interpreter_and_of_torch_is_trusted(monkeypatch):
    def status(uid: int, mode: int = 0o755) -> os.stat_result:
        return os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, uid, 0, 0, 0, 0, 0))

    running = {os.stat(os.path.dirname(one)).st_uid for one in (os.path.realpath(sys.executable), os.__file__)}
    assert running <= {one.st_uid for one in trust.code_directories()}
    monkeypatch.setattr(trust, "code_directories", lambda: (status(0), status(777)))
    assert trust.refusal("x", status(777)) is None
    assert "belongs to user 778" in trust.refusal("x", status(778))
    assert "by everybody" in trust.refusal("x", status(777, 0o757))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_one_rule_for_a_compiler_that_is_named_and_one_on_the_path(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    os.chown(program, SOMEBODY, -1)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    for variables in ({}, {"CXX": str(program)}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ToolchainError, match=f"is not run: .*belongs to user {SOMEBODY}"):
            toolchain.find_cxx()
    monkeypatch.setattr(trust, "code_directories", lambda: (program.stat(),))
    assert toolchain.find_cxx() == str(program)
    monkeypatch.delenv("CXX")
    assert toolchain.find_cxx() == str(program)


# umask

AFTER = "\nassert gen_jit_spec('tiny', [sys.argv[1]]).probe().state == 'ready'\nprint('ready')\n"


@needs_users
def test_a_umask_that_takes_everything(of_everybody):
    """Test a user whom the umask restricts. Another process of that user finds the first one's build."""
    source, mine = of_everybody
    variables = {"FLASHINFER_WORKSPACE_DIR": f"{mine}/workspace", "FLASHINFER_RUNTIME_DIR": f"{mine}/runtime"}
    umask = "import os; os.umask(0o777)\n"
    path, number = built(run(umask + textwrap.dedent(BUILD), source, before=AS_SOMEBODY, **variables))
    assert path.startswith(f"{mine}/workspace") and number == "33"
    again = run(umask + textwrap.dedent(BUILD) + AFTER, source, before=AS_SOMEBODY, **variables)
    assert again.stdout.endswith("ready\n"), again.stdout + again.stderr
    assert not list(mine.rglob("*")) or all(one.stat().st_mode & 0o600 == 0o600 for one in mine.rglob("*"))
