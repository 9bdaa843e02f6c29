"""Builds: once, complete, checked, with errors that tell what to do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flashinfer.errors import BuildError, JitFrozenError, ModuleLoadError, ToolchainError
from flashinfer.jit import build_jit_specs, clear_cache_dir, subscribe
from flashinfer.jit.build import make_request
from flashinfer.jit.history import Progress
from flashinfer.jit.resolve import look_up, resolve

from ..support.processes import python_path, until

FIRST_CALL = """
    import sys, torch, flashinfer
    started = []
    sys.addaudithook(lambda event, args: started.append(args[0]) if event == "subprocess.Popen" else None)
    locks = []
    sys.addaudithook(lambda event, args: locks.append(args) if event in ("fcntl.flock", "fcntl.lockf") else None)
    x, w = torch.randn(5, 64), torch.randn(64)
    y = flashinfer.rmsnorm(x, w)
    want = torch.nn.functional.rms_norm(x.double(), (64,), w.double(), 1e-6)
    assert (y - want).abs().max() < 1e-5
    print(len(started), len(locks), "flashinfer.jit.lock" in sys.modules, "jinja2" in sys.modules)
"""


def test_a_built_module_is_never_built_again(make_spec, compilers_started):
    spec = make_spec()
    first = spec.build()
    assert compilers_started() == 1
    assert spec.build() == first and build_jit_specs([spec, spec]) == [first, first]
    assert compilers_started() == 1


def test_a_batch_reuses_a_single_build_and_the_reverse(make_spec, compilers_started):
    one, two = make_spec("one"), make_spec("two")
    one.build()
    build_jit_specs([one, two])
    assert compilers_started() == 2
    two.build()
    assert compilers_started() == 2


HIDE_AOT = """import sys, torch, flashinfer, pathlib
    flashinfer.jit.env.default_aot_dir = lambda: pathlib.Path("/nowhere")"""


def test_first_call_builds_with_one_line_and_later_processes_start_nothing(python, workspace):
    """Run a real operator with a cold workspace in three processes.

    The last one runs as another user, on a read-only tree, with no tools on PATH.
    """
    program = FIRST_CALL.replace("import sys, torch, flashinfer", HIDE_AOT)
    unoptimised = {"FLASHINFER_AOT_DIR": None, "FLASHINFER_EXTRA_CFLAGS": "-O0"}
    first = python(program, **unoptimised)
    # On a very busy machine, a build that takes ten seconds also prints its progress.
    lines = [line for line in first.stderr.splitlines() if line.startswith("flashinfer:") and " steps, " not in line]
    assert len(lines) == 1 and lines[0].startswith("flashinfer: building norm_cpu (2 source files)"), first.stderr
    second = python(program, **unoptimised)
    assert second.stdout.split() == ["0", "0", "False", "False"] and "flashinfer:" not in second.stderr
    os.system(f"chmod -R a-w {workspace}")
    try:
        if os.getuid() == 0:  # root writes anywhere: become a user who can only read this test's folder
            program = program.replace(
                "flashinfer.jit.env",
                # The standard library may lie in a folder of root's: import before.
                "flashinfer.rmsnorm, flashinfer.jit.load, flashinfer.jit.env; import os; os.setgid(12345); os.setuid(12345)\n"
                "    flashinfer.jit.env",
                1,
            )
            for folder in [workspace, *workspace.parents][:-1]:
                folder.chmod(folder.stat().st_mode | 0o055)
        third = python(program, **unoptimised, PATH="/nowhere", CXX=None, HOME="/nowhere")
        assert third.stdout.split()[:2] == ["0", "0"]
    finally:
        os.system(f"chmod -R u+w {workspace}")


def test_a_compile_error(make_spec, workspace):
    spec = make_spec("broken", {"unit.cc": "int good;\nint bad = no_such_name;\nint worse = other_name;\n"})
    with pytest.raises(BuildError) as caught:
        spec.build()
    error, text = caught.value, str(caught.value)
    assert error.name == "broken" and "'no_such_name' was not declared" in error.reason
    assert "unit.cc:2:11: error:" in error.reason, "file and line of the user's source"
    assert "worker" not in error.command, "only the compiler's command, to be run in the build directory"
    again = subprocess.run(shlex.split(error.command), cwd=error.log.parents[2], capture_output=True, text=True)
    assert again.returncode != 0 and "no_such_name" in again.stderr
    assert "-c" in error.command and "unit.cc" in error.command and error.log.read_text().count("error:") == 2
    assert any("no_such_name" in line for line in text.splitlines()[-20:]) and "broken" in text.splitlines()[0]
    spec = make_spec("broken", {"unit.cc": "int good;\n"})
    assert spec.build().path.exists(), "the failed build does not block the next one"


def test_a_link_error(make_spec):
    spec = make_spec("unlinked", extra_ldflags=["-lno_such_library"])
    with pytest.raises(BuildError, match="cannot find -lno_such_library"):
        spec.build()


def test_one_broken_module_does_not_stop_the_others(make_spec):
    good, bad = make_spec("good"), make_spec("bad", {"unit.cc": "#error on purpose\n"})
    with pytest.raises(BuildError, match="on purpose"):
        build_jit_specs([bad, good])
    assert look_up(good).artifact is not None and look_up(bad).artifact is None


def test_a_header_named_by_a_macro_is_a_build_error(make_spec):
    spec = make_spec("hidden", {"unit.cc": '#define NAME "x.h"\n#include NAME\n', "x.h": ""})
    with pytest.raises(BuildError, match=r"the compiler read .*x\.h, which the module's key does not cover"):
        spec.build()
    assert look_up(spec).artifact is None


def test_a_source_that_changes_while_it_is_compiled(make_spec, tmp_path, monkeypatch):
    spec = make_spec()
    launcher = tmp_path / "meddle"
    launcher.write_text(f'#!/bin/sh\n"$@"\necho "// later" >> {spec.source_paths()[0]}\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(launcher))
    with pytest.raises(BuildError, match="a source, a header or an object changed"):
        spec.build()


def test_an_edited_header_is_built_again(make_spec, compilers_started):
    first = make_spec().build()
    spec = make_spec(
        files={
            "unit.cc": '#include "unit.h"\nextern "C" int answer() { return ANSWER; }\n',
            "unit.h": "#define ANSWER 43\n",
        }
    )
    assert spec.build().path != first.path and compilers_started() == 2


def test_no_compiler(make_spec, monkeypatch):
    spec = make_spec()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolchainError, match=r"cannot find a C\+\+ compiler"):
        spec.build()


def test_no_gpu_and_no_arch(make_spec, monkeypatch):
    monkeypatch.setattr("flashinfer.jit.machine.target.visible_gpus", lambda: ())
    with pytest.raises(ToolchainError, match="FLASHINFER_CUDA_ARCH_LIST"):
        make_spec("gpu", {"unit.cu": ""}).build()


def test_disabled(make_spec, monkeypatch):
    spec = make_spec()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    with pytest.raises(
        JitFrozenError, match="module 'tiny' is not built and FLASHINFER_DISABLE_JIT forbids building it: no artifact"
    ):
        spec.build()
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    built = spec.build()
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert spec.build() == built


def test_an_unwritable_workspace(make_spec, monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(blocked / "workspace"))
    spec = make_spec()
    with pytest.warns(UserWarning, match="cannot be written .* set FLASHINFER_WORKSPACE_DIR"):
        artifact = spec.build()
    assert artifact.path.exists() and not artifact.path.is_relative_to(tmp_path)
    assert look_up(spec).artifact == artifact, "this process finds it again"


def test_unkeyed_variables_do_not_reach_the_compiler(make_spec, tmp_path, monkeypatch):
    (tmp_path / "sneaky").mkdir()
    (tmp_path / "sneaky" / "extra.h").write_text("")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path / "sneaky"))
    with pytest.raises(BuildError, match=r"extra\.h: No such file"):
        make_spec("s", {"unit.cc": "#include <extra.h>\n"}).build()


def test_same_sources_elsewhere_give_the_same_bytes(make_spec, tmp_path, monkeypatch):
    first = make_spec().build().manifest
    monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(tmp_path / "another workspace"))
    second = make_spec().build().manifest
    assert first["build_key"] == second["build_key"] and first["sha256"] == second["sha256"]


def test_more_modules_than_one_run_takes(make_spec, compilers_started, monkeypatch, tmp_path):
    monkeypatch.setattr("flashinfer.jit.resolve.MAX_MODULES", 2)
    specs = [make_spec(f"m{number}") for number in range(5)]
    assert [artifact.name for artifact in build_jit_specs(specs)] == [spec.name for spec in specs]
    assert compilers_started() == 5
    assert not list(tmp_path.glob("runtime/*/*.lock")), "no lock is left"
    assert not list((tmp_path / "workspace" / "build").iterdir())


def test_two_modules_of_one_name(make_spec):
    with pytest.raises(ValueError, match="requests: got two modules of one name"):
        build_jit_specs([make_spec("same"), make_spec("same", extra_cflags=["-DMORE"])])


def test_eight_threads_build_one_module(make_spec, compilers_started):
    spec, found = make_spec(), []
    threads = [threading.Thread(target=lambda: found.append(spec.build())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8 and compilers_started() == 1


def test_four_processes_build_one_module(python, make_spec, compilers_started, tmp_path):
    spec = make_spec()
    program = f"""
        from flashinfer.jit import gen_jit_spec
        print(gen_jit_spec("tiny", [{spec.source_paths()[0]!r}]).build().path)
    """
    results = []
    threads = [threading.Thread(target=lambda: results.append(python(program))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.stdout for result in results}) == 1 and compilers_started() == 1


def test_an_interrupted_build_resumes(make_spec, tmp_path, monkeypatch):
    """A build is killed between two files. The next one compiles only the other file."""
    files = {"a.cc": "int a;\n", "b.cc": "int b;\n"}
    spec = make_spec("two", files)
    slow = tmp_path / "slow"
    slow.write_text(
        '#!/bin/sh\necho >> "$0.count"\ncase "$*" in *b.cc*) test -e "$0.waiting" || { touch "$0.waiting"; sleep 600; } ;; esac\nexec "$@"\n'
    )
    slow.chmod(0o755)
    monkeypatch.setenv("FLASHINFER_CXX_LAUNCHER", str(slow))
    program = f"from flashinfer.jit import gen_jit_spec; gen_jit_spec('two', {list(spec.source_paths())!r}).build()"
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[2]), "MAX_JOBS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    until(lambda: Path(f"{slow}.waiting").exists())
    os.killpg(process.pid, 9)
    process.wait()
    assert look_up(spec).artifact is None
    spec.build()
    assert len(Path(f"{slow}.count").read_text().splitlines()) == 3, "a.cc once, b.cc twice"


def test_events(make_spec):
    events = []
    end = subscribe(events.append)
    spec = make_spec()
    spec.build()
    spec.build()
    end()
    assert [event.kind for event in events] == ["miss", "compile", "hit"]
    assert "no artifact" in events[0].detail["reason"] and events[1].ms > 0


def test_load(make_spec, python):
    spec = make_spec("loadable_tiny")
    spec.build_and_load()
    spec.build_and_load()
    changed = make_spec("loadable_tiny", {"unit.cc": "int other;\n"})
    with pytest.raises(ModuleLoadError, match="changed since"):
        changed.build_and_load()


def test_a_library_that_does_not_load(make_spec):
    spec = make_spec("unresolved", {"unit.cc": "int missing(); int use = missing();\n"})
    with pytest.raises(ModuleLoadError, match=r"module 'unresolved' at .* does not load: .*missing"):
        spec.build_and_load()


def test_a_library_that_the_linker_still_writes_is_not_published(make_spec, tmp_path, workspace, monkeypatch):
    """The last compiler's line is read late, while the linker runs.

    Only the linker's own line ends its step.
    """
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-shared*) for word; do case $word in *.so) echo half > "$word"; sleep 1;; esac; done;;'
        ' esac\nexec /usr/bin/g++ "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def look_late(progress: Progress) -> None:
        if progress.done == 1:
            until(lambda: list(workspace.glob("build/*/late/late.so")))

    spec = make_spec("late", {"a.cc": "int a;\n", "b.cc": "int b;\n"})
    (outcome,) = resolve([make_request(spec)], watch=look_late)
    assert outcome.how == "built" and look_up(spec).artifact == outcome.artifact


def test_clear_cache_dir(make_spec):
    spec = make_spec()
    spec.build()
    clear_cache_dir()
    assert look_up(spec).artifact is None
