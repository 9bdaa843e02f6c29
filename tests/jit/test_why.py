"""``flashinfer why``: exactly the fields that differ from the nearest artifact."""

from __future__ import annotations

import json
import shutil

import pytest

from flashinfer.cli import usage
from flashinfer.cli.main import main
from flashinfer.jit.module import JitSpec
from flashinfer.jit.resolve import look_up
from flashinfer.jit.specfile import write_specs
from flashinfer.jit.specjson import to_json


@pytest.fixture
def ask(monkeypatch, capsys):
    """Return a function that asks about a spec as part of the matrix: (exit code, JSON)."""

    def run(spec: JitSpec, *arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(usage, "matrix_specs", lambda matrix: [spec])
        capsys.readouterr()
        code = main(["why", spec.name, "--json", *arguments])
        (answer,) = json.loads(capsys.readouterr().out)
        return code, answer

    return run


def fields(answer: dict) -> dict[str, tuple]:
    return {row["field"]: (row["nearest"], row["wanted"]) for row in answer["differences"]}


def test_ready(ask, make_spec):
    spec = make_spec()
    artifact = spec.build()
    code, answer = ask(spec)
    assert code == 0 and answer["state"] == "ready" and answer["nearest"] == str(artifact.path)
    assert answer["differences"] == [] and answer["key"] == spec.key


def test_nothing_there(ask, make_spec, workspace):
    code, answer = ask(make_spec())
    assert code == 1 and answer["state"] == "missing" and answer["nearest"] is None and not workspace.exists()


CHANGES = {
    "cflags": dict(extra_cflags=["-DNEW"]),
    "ldflags": dict(extra_ldflags=["-lm"]),
    "namespace": dict(namespace="other"),
    "config": dict(config={"HEAD_DIM": 64}),
    "coverage dtype": dict(coverage={"dtype": ["float16"]}),
}


@pytest.mark.parametrize("field, options", CHANGES.items(), ids=CHANGES)
def test_one_field(ask, make_spec, field, options):
    was, now = make_spec(), make_spec(**options)
    was.build()
    code, answer = ask(now)
    assert code == 1 and list(fields(answer)) == [field]
    has, wanted = fields(answer)[field]
    part = field.partition(" ")[2]
    assert wanted == (now.fields()[field] if not part else now.fields()["coverage"][part]) and wanted != has


def test_files_by_name(ask, make_spec):
    was = make_spec(files={"unit.cc": '#include "a.h"\n#include "b.h"\n', "a.h": "", "b.h": ""})
    was.build()
    now = make_spec(files={"unit.cc": '#include "a.h"\n#include "c.h"\n', "a.h": "", "c.h": ""})
    _, answer = ask(now)
    found = fields(answer)
    assert list(found) == ["files <0>/b.h", "files <0>/c.h", "files <0>/unit.cc"]
    assert found["files <0>/b.h"][1] is None and found["files <0>/c.h"][0] is None


def test_target_and_tools(ask, make_spec, monkeypatch, tmp_path):
    spec = make_spec()
    artifact = spec.build()
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64")
    assert fields(ask(spec)[1]) == {"archs": (artifact.manifest["archs"], ["x86-64"])}
    monkeypatch.delenv("FLASHINFER_CPU_ARCH")
    other = {**artifact.manifest["toolchain"], "cxx": "(vendor) 99"}
    monkeypatch.setattr("flashinfer.jit.lookup.toolchain_identity", lambda *_: other)
    assert fields(ask(spec)[1]) == {"toolchain cxx": (artifact.manifest["toolchain"]["cxx"], "(vendor) 99")}
    shutil.copytree(artifact.directory, tmp_path / "aot" / "tiny")
    assert ask(spec)[0] == 0, "prebuilt modules may come from any tools"


def test_the_nearest_of_many(ask, make_spec):
    for options in (
        dict(extra_cflags=["-DA"], extra_ldflags=["-lm"]),
        dict(extra_cflags=["-DA"]),
        dict(namespace="x", config={"A": 1}),
    ):
        make_spec(**options).build()
    near = look_up(make_spec(extra_cflags=["-DA"])).artifact
    _, answer = ask(make_spec(extra_cflags=["-DB"]))
    assert answer["nearest"] == str(near.path) and list(fields(answer)) == ["cflags"]
    assert answer["reasons"] == [
        "3 artifacts of this name in the workspace were built from other source files, flags or configuration; "
        "compare: `flashinfer why tiny`"
    ]


def test_damage_is_a_reason_without_a_difference(ask, make_spec):
    spec = make_spec()
    artifact = spec.build()
    data = artifact.path.read_bytes()
    artifact.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, answer = ask(spec)
    assert code == 1 and answer["differences"] == [] and "damaged" in answer["reasons"][0]


def test_for_a_person(make_spec, monkeypatch, capsys):
    make_spec().build()
    now = make_spec(files={"unit.cc": "int other;\n"}, extra_cflags=["-DNEW"])
    monkeypatch.setattr(usage, "matrix_specs", lambda matrix: [now])
    capsys.readouterr()
    assert main(["why", "tiny"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "tiny would be built: 1 artifact of this name in the workspace was built from other source"
    )
    assert lines[1].startswith("nearest: /")
    shown = {line.split("  ")[0]: line.split("  ", 1)[1].split() for line in lines[3:]}
    assert shown["cflags"] == ["-DNEW", "-"], "only flags that differ"
    assert len(shown["files <0>/unit.cc"][1]) == 12
    now.build()
    capsys.readouterr()
    assert main(["why", "tiny"]) == 0 and "tiny is ready: a load uses /" in capsys.readouterr().out


def test_a_module_of_a_trace(make_spec, tmp_path, capsys):
    spec = make_spec("traced")
    line = {"spec": to_json(spec), "key": spec.key, "needs": {}, "archs": []}
    write_specs(tmp_path / "specs.jsonl", [line])
    assert main(["why", "traced", "--specs", str(tmp_path / "specs.jsonl")]) == 1
    spec.build()
    assert main(["why", "traced", "--specs", str(tmp_path / "specs.jsonl")]) == 0
    assert main(["why", "absent", "--specs", str(tmp_path / "specs.jsonl")]) == 2
    assert "has no module 'absent', only traced" in capsys.readouterr().err


def test_an_unknown_name(capsys):
    assert main(["why", "no_such_module"]) == 2 and "there is no module 'no_such_module'" in capsys.readouterr().err
