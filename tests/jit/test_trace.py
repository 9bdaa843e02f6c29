"""From a run to a package: specs as JSON, what a program asked for, building it, proving that nothing compiles."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer import env
from flashinfer.cli.main import main
from flashinfer.cli.record import from_json, record, to_json
from flashinfer.cli.specs import Asked, merge, one_per_name, read_specs, write_specs
from flashinfer.jit import JitSpec, build_jit_specs, gen_jit_spec, store
from flashinfer.jit.modules import Matrix, matrix_specs
from flashinfer.jit.modules.norm import gen_norm_module

from .conftest import ROOT


def through_text(spec: JitSpec) -> dict:
    return json.loads(json.dumps(to_json(spec)))


def test_every_module_of_the_matrix_survives_json(tmp_path):
    for spec in matrix_specs(Matrix()):
        value = through_text(spec)
        assert from_json(value, tmp_path) == spec and value["own"] == {}
        assert env.data_root() not in json.dumps(value), "the same everywhere"
    assert os.listdir(tmp_path) == []


def test_users_files_travel_along_and_the_key_stays(tmp_path, make_spec):
    folder = tmp_path / "src" / "mine"
    spec = make_spec(
        "mine",
        {
            "deep/unit.cc": '#include "unit.h"\n#include <more/other.h>\n#include "../beside.h"\n',
            "deep/unit.h": "// caf\xe9 \n",
            "inc/more/other.h": "",
            "beside.h": "",
            "unrelated.h": "",
        },
        extra_include_paths=[folder / "inc"],
        extra_cflags=[f"-I{env.data_root()}/include"],
        config={"causal": True, "head_dim": 64, "dtype": "half"},
        coverage={"dtype": ["float16", "bfloat16"]},
    )
    (folder / "deep" / "unit.h").write_bytes(b"// \xff\r\n\x00")
    value, key = through_text(spec), spec.key
    assert sorted(value["own"]) == ["beside.h", "deep/unit.cc", "deep/unit.h", "inc/more/other.h"]
    assert str(tmp_path) not in json.dumps(value) and env.data_root() not in json.dumps(value)
    shutil.rmtree(folder)
    again = from_json(value, tmp_path / "elsewhere")
    assert again.key == key and again.config == spec.config and again.sources != spec.sources
    assert again.sources[0].startswith(str(tmp_path / "elsewhere"))
    assert through_text(again) == value and from_json(value, tmp_path / "elsewhere") == again
    os.truncate(again.sources[0], 3)
    assert from_json(value, tmp_path / "elsewhere").key == key, "a damaged file is written again"


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


@given(
    places=st.sets(NAMES, min_size=2, max_size=6),
    texts=st.lists(st.binary(max_size=40), min_size=6),
    roots=st.sets(NAMES, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_files_and_folders_are_the_key_stays(places, texts, roots, tmp_path_factory):
    """Files in any folders, one above the other too, that include each other in both ways, with any bytes."""
    home, elsewhere = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("elsewhere")
    headers = [f"{name}.h" for name in sorted(places)]
    for number, (name, text) in enumerate(zip(headers, texts, strict=False)):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"#include <%s>\n" % headers[number - 1].encode() + text)
    first, *rest = headers
    beside = os.path.relpath(home / rest[0], (home / first).parent)
    source = (home / first).with_suffix(".cc")
    source.write_text(f'#include "{beside}"\n#include "{Path(first).name}"\n')
    spec = gen_jit_spec("m", [source], extra_include_paths=[home, *(home / root for root in sorted(roots))])
    value, key = through_text(spec), spec.key
    shutil.rmtree(home)
    again = from_json(value, elsewhere)
    assert again.key == key and str(home) not in json.dumps(value) and through_text(again) == value


def test_other_contents_of_one_name_do_not_meet(tmp_path, make_spec):
    first = through_text(make_spec())
    second = through_text(make_spec(files={"unit.cc": "int other;\n"}))
    specs = [from_json(value, tmp_path / "elsewhere") for value in (first, second)]
    assert specs[0].sources != specs[1].sources and specs[0].key != specs[1].key


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(own={"/etc/x.cc": ""}), "/etc/x.cc"),
        (dict(own={"../x.cc": ""}), "../x.cc"),
        (dict(own={"a/../../x.cc": ""}), "stays in its folder"),
        (dict(own={"x.cc": 1}), "own: wanted the text"),
        (dict(sources=["/etc/x.cc"]), "stays in its folder"),
        (dict(sources=["<own>/../../x.cc"]), "stays in its folder"),
        (dict(sources=["../x.cc"]), "stays in its folder"),
        (dict(include_paths=["<root>/../.."]), "stays in its folder"),
        (dict(sources="x.cc"), "sources: got 'x.cc'"),
        (dict(cflags=[1]), "cflags: got"),
        (dict(config=[["a", None]]), "config: got"),
        (dict(config=[["a", 1, 2]]), "config: got"),
        (dict(coverage=[["dtype", "float16"]]), "coverage: got"),
        (dict(name="../x"), "name: got '../x'"),
        (dict(name=3), "name: got 3"),
        (dict(more=1), "spec: got"),
    ],
)
def test_a_record_that_cannot_be_is_refused_and_nothing_is_written(change, message, tmp_path, make_spec):
    value = {**through_text(make_spec()), **change}
    with pytest.raises(ValueError, match=message.replace(".", "[.]")):
        from_json(value, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_record_that_lacks_a_field_is_refused(tmp_path, make_spec):
    for name in [one.name for one in fields(JitSpec)]:
        value = through_text(make_spec())
        del value[name]
        with pytest.raises(ValueError, match="spec: got"):
            from_json(value, tmp_path)


def test_files_that_are_somebodys_toolkit_are_refused(make_spec, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("flashinfer.cli.record.LARGEST", 100)
    spec = make_spec(files={"unit.cc": "//" + "x" * 100})
    with pytest.raises(ValueError, match="outside of"):
        to_json(spec)
    monkeypatch.setenv("FLASHINFER_JIT_TRACE", str(tmp_path / "trace"))
    record(spec, None)
    assert "tiny is missing in the trace" in capsys.readouterr().err


def requests(folder) -> list[tuple]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted((one["spec"]["name"], one["needs"], one["archs"], one["key"]) for one in found)


def test_what_is_asked_for_is_recorded_hit_or_miss_once(make_spec, monkeypatch, tmp_path):
    trace = tmp_path / "trace"
    monkeypatch.setenv("FLASHINFER_JIT_TRACE", str(trace))
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64")
    spec, other = make_spec("one"), make_spec("two")
    for _ in range(3):
        build_jit_specs([spec, other])
    assert requests(trace) == [("one", {}, ["x86-64"], spec.key), ("two", {}, ["x86-64"], other.key)]


def test_a_load_is_recorded_with_what_it_needs_even_where_it_fails(make_spec, python, tmp_path):
    trace = tmp_path / "trace"
    spec = make_spec(coverage={"dtype": ["float16", "bfloat16"]})
    program = """
        import sys
        from flashinfer import jit
        from flashinfer.jit.load import load
        spec = jit.gen_jit_spec("tiny", [sys.argv[1]], coverage={"dtype": ["float16", "bfloat16"]})
        load(spec, {"dtype": ("float16",)})
        load(spec, {"dtype": ("float16",)})
        jit.gen_jit_spec("bad", [sys.argv[1]], extra_cflags=["--no-such-flag"]).build_and_load()
    """
    for _ in range(2):  # a miss, then a hit
        done = python(program, spec.sources[0], check=False, FLASHINFER_JIT_TRACE=str(trace))
        assert "BuildError" in done.stderr
        found = requests(trace)
        assert [(name, needs) for name, needs, _, _ in found] == [("bad", {}), ("tiny", {"dtype": ["float16"]})]
        assert found[1][3] == spec.key


def test_a_trace_that_cannot_be_written_is_said_and_the_program_goes_on(make_spec, python, tmp_path):
    (tmp_path / "file").write_text("")
    program = "import sys; from flashinfer import jit; print(jit.gen_jit_spec('tiny', [sys.argv[1]]).build().name)"
    done = python(program, make_spec().sources[0], FLASHINFER_JIT_TRACE=str(tmp_path / "file"))
    assert done.stdout.strip() == "tiny" and "tiny is missing in the trace" in done.stderr


def test_without_a_trace_nothing_is_encoded(make_spec, python):
    program = """
        import sys
        from flashinfer import jit
        jit.gen_jit_spec("tiny", [sys.argv[1]]).build_and_load()
        assert "flashinfer.cli.record" not in sys.modules
    """
    python(program, make_spec().sources[0])


# The commands: trace, build_aot.py --specs, verify, export --specs.

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
    """Programs find this package."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def recorded(make_spec, tmp_path, process, monkeypatch):
    """A program with a child that is killed, and what was recorded of it."""
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
    program = "import torch, flashinfer; flashinfer.rmsnorm(torch.ones(2, 8), torch.ones(8))"
    assert main(["trace", "-o", str(tmp_path / "specs"), "--", sys.executable, "-c", program]) == 0
    (asked,) = read_specs(tmp_path / "specs", tmp_path)
    assert asked.spec == gen_norm_module("cpu") and asked.needs == {"dtype": ["float32"]}


def test_a_program_that_asks_for_nothing_gives_an_empty_file(tmp_path):
    assert main(["trace", "-o", str(tmp_path / "specs"), "--", "true"]) == 0
    assert (tmp_path / "specs").read_text() == ""


def test_what_ends_the_program_is_told(tmp_path, process):
    """A signal to the command reaches the program, and the file is written all the same."""
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
    assert traced.wait(timeout=30) == 128 + 15 and (tmp_path / "specs").exists()
    traced.stdout.close()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-o", "/none/specs", "--", "true"], "/none is no directory"),
        (["-o", "x", "--", "no-such-program"], "not a program"),
    ],
)
def test_a_trace_that_cannot_be(arguments, message, tmp_path, monkeypatch, capsys):
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
        ("[]", "line 1: got no record"),
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
def test_a_file_that_is_none_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "specs").write_text(text + "\n")
    assert main(["verify", "--specs", str(tmp_path / "specs")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_others_can_write_or_that_is_missing_is_refused(recorded, tmp_path, aot, capsys):
    _, output = recorded
    output.chmod(0o666)
    assert main(["verify", "--specs", str(output)]) == 2
    assert "can be written by everybody" in capsys.readouterr().err
    assert aot.main(["--specs", str(output), "--out-dir", str(tmp_path / "out")]) == 2
    assert "can be written by everybody" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["verify", "--specs", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_module_that_this_version_does_not_have_is_said(tmp_path, aot, capsys):
    value = to_json(gen_norm_module("cpu")) | {"sources": ["csrc/gone.cc"], "source_cflags": []}
    write_specs(tmp_path / "specs", [{"spec": value, "key": "", "needs": {}, "archs": []}])
    assert main(["verify", "--specs", str(tmp_path / "specs")]) == 2
    assert "norm_cpu: " in (err := capsys.readouterr().err) and "csrc/gone.cc" in err
    assert aot.main(["--specs", str(tmp_path / "specs"), "--out-dir", str(tmp_path / "out")]) == 2
    assert "csrc/gone.cc" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_exactly_what_was_recorded_is_built_elsewhere_and_hit(
    recorded, aot, tmp_path, workspace, compilers_started, capsys, monkeypatch
):
    spec, output = recorded
    shutil.rmtree(workspace)
    os.rename(tmp_path / "src", tmp_path / "moved")  # the other machine has none of the user's files
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
    assert spec.find().directory == image / "tiny" and not workspace.exists()
    assert main(["export", str(tmp_path / "modules.tar"), "--specs", str(output)]) == 0


def test_another_arch_is_built_when_it_is_named(recorded, aot, tmp_path, capsys):
    _, output = recorded
    for options, wanted in ((["--cpu-arch", "x86-64"], "x86-64"), ([], "x86-64-v2")):
        arguments = ["--specs", str(output), "--dry-run", "--out-dir", str(tmp_path / "out"), "--json"]
        assert aot.main([*arguments, *options]) == 0
        assert [row["archs"] for row in json.loads(capsys.readouterr().out)] == [[wanted]]
    assert aot.main([*arguments, "--backend", "cuda"]) == 0 and json.loads(capsys.readouterr().out) == []
    with pytest.raises(SystemExit):
        aot.main([*arguments, "--families", "norm"])
    assert "--specs: the file says what to build" in capsys.readouterr().err


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
    assert "two modules are called 'tiny' and differ in cflags" in capsys.readouterr().err


def test_what_a_spec_is_built_for(make_spec):
    def target(backend, *archs):
        return Asked(make_spec(backend=backend), {}, archs, "").target()

    assert target("cpu", "x86-64-v4", "x86-64-v2", "x86-64-v3").archs == ("x86-64-v2",)
    assert target("cpu", "generic").archs == ("generic",) and target("cpu") is None
    assert target("cuda", "8.0", "9.0a").archs == ("8.0", "9.0a") and target("cuda") is None


def shipped(spec: JitSpec, place: Path, **changes) -> None:
    """An artifact of ``spec`` in an AOT directory, its manifest changed."""
    built = spec.build()
    store.publish(built.path, {**built.manifest, **changes}, place / spec.name)


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
    # A machine that asks for a level gets that and no other.
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64-v2")
    assert "asked for x86-64-v2" in verdict(specs, "--cpu-arch", "x86-64-v4")[1]


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
    monkeypatch.setattr("flashinfer.jit.target.visible_gpus", lambda: ())
    monkeypatch.setattr("flashinfer.cli.verify.visible_gpus", lambda: ())
    built, spec = make_spec().build(), make_spec(backend="cuda")
    shipped_manifest = {**built.manifest, **spec.fields(), "key": spec.key, "archs": archs}
    store.publish(built.path, shipped_manifest, tmp_path / "aot" / "tiny")
    assert (verdict(write(tmp_path / "specs", spec), "--cuda-arch", gpus)[0] == 0) == ready
    # Where none is named, those of the machine that was recorded.
    assert (verdict(write(tmp_path / "specs", spec, archs=gpus.split()))[0] == 0) == ready


def test_needs_decide_what_a_narrower_module_is_good_for(make_spec, tmp_path, verdict):
    wide = make_spec(coverage={"dtype": ["float16", "bfloat16"]})
    shipped(wide.covering({"dtype": ["float16"]}), tmp_path / "aot")
    for needs, code in (({"dtype": ["float16"]}, 0), ({"dtype": ["bfloat16"]}, 1), ({}, 1)):
        line = {"spec": to_json(wide), "key": wide.key, "needs": needs, "archs": []}
        write_specs(tmp_path / "specs", [line])
        assert verdict(tmp_path / "specs")[0] == code


def test_other_sources_than_were_recorded_are_said(make_spec, tmp_path, verdict):
    spec = make_spec()
    line = {"spec": to_json(spec), "key": "0" * 64, "needs": {}, "archs": []}
    write_specs(tmp_path / "specs", [line])
    assert verdict(tmp_path / "specs")[1].endswith("it was recorded with other sources than those here")


def test_without_a_file_the_matrix_is_verified(capsys, monkeypatch):
    monkeypatch.setattr("flashinfer.cli.verify.matrix_specs", lambda _: [gen_norm_module("cpu")])
    assert main(["verify"]) == 1
    out, err = capsys.readouterr()
    assert "norm_cpu" in out and "missing" in out and "1 of 1 modules would be compiled" in err
