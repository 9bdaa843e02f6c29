"""Specs as JSON: they keep their keys on other machines, and requests of a program are recorded."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashinfer import env
from flashinfer.jit import JitSpec, build_jit_specs, gen_jit_spec
from flashinfer.jit.modules import Matrix, matrix_specs
from flashinfer.jit.specjson import from_json, to_json
from flashinfer.jit.trace import record


def through_text(spec: JitSpec) -> dict:
    return json.loads(json.dumps(to_json(spec)))


def test_every_module_of_the_matrix_survives_json(tmp_path):
    for spec in matrix_specs(Matrix()):
        value = through_text(spec)
        assert from_json(JitSpec, value, tmp_path) == spec and value["own"] == {}
        assert env.data_root() not in json.dumps(value), "equal on every machine"
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
            "lib/libx.a": "!<arch>\n",
        },
        extra_include_paths=[folder / "inc"],
        extra_cflags=[f"-I{env.data_root()}/include"],
        extra_ldflags=[str(folder / "lib" / "libx.a"), "-lm"],
        config={"causal": True, "head_dim": 64, "dtype": "half"},
        coverage={"dtype": ["float16", "bfloat16"]},
    )
    (folder / "deep" / "unit.h").write_bytes(b"// \xff\r\n\x00")
    value, key = through_text(spec), spec.key
    assert sorted(value["own"]) == ["beside.h", "deep/unit.cc", "deep/unit.h", "inc/more/other.h", "lib/libx.a"]
    assert str(tmp_path) not in json.dumps(value) and env.data_root() not in json.dumps(value)
    shutil.rmtree(folder)
    again = from_json(JitSpec, value, tmp_path / "elsewhere")
    assert again.key == key and again.config == spec.config and again.sources != spec.sources
    assert again.sources[0].startswith(str(tmp_path / "elsewhere"))
    assert through_text(again) == value and from_json(JitSpec, value, tmp_path / "elsewhere") == again
    os.truncate(again.sources[0], 3)
    assert from_json(JitSpec, value, tmp_path / "elsewhere").key == key, "a damaged file is replaced"


NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)


@given(
    places=st.sets(NAMES, min_size=2, max_size=6),
    texts=st.lists(st.binary(max_size=40), min_size=6),
    roots=st.sets(NAMES, max_size=3),
)
@settings(max_examples=60)
def test_the_key_stays_for_any_files_and_folders(places, texts, roots, tmp_path_factory):
    """Files in any folders, also nested ones, that include each other in both ways, with any bytes."""
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
    again = from_json(JitSpec, value, elsewhere)
    assert again.key == key and str(home) not in json.dumps(value) and through_text(again) == value


def test_other_contents_of_one_name_do_not_meet(tmp_path, make_spec):
    first = through_text(make_spec())
    second = through_text(make_spec(files={"unit.cc": "int other;\n"}))
    specs = [from_json(JitSpec, value, tmp_path / "elsewhere") for value in (first, second)]
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
        (dict(ldflags=["<own>/../libx.a"]), "stays in its folder"),
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
def test_an_invalid_record_writes_nothing(change, message, tmp_path, make_spec):
    value = {**through_text(make_spec()), **change}
    with pytest.raises(ValueError, match=message.replace(".", "[.]")):
        from_json(JitSpec, value, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_a_record_that_lacks_a_field_is_refused(tmp_path, make_spec):
    for name in [one.name for one in fields(JitSpec)]:
        value = through_text(make_spec())
        del value[name]
        with pytest.raises(ValueError, match="spec: got"):
            from_json(JitSpec, value, tmp_path)


def test_large_files_of_users_are_refused(make_spec, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("flashinfer.jit.specjson.LARGEST", 100)
    spec = make_spec(files={"unit.cc": "//" + "x" * 100})
    with pytest.raises(ValueError, match="outside of"):
        to_json(spec)
    monkeypatch.setenv("FLASHINFER_JIT_TRACE", str(tmp_path))
    record(spec, None)
    assert "tiny is missing in the trace" in capsys.readouterr().err


def requests(folder) -> list[tuple]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted((one["spec"]["name"], one["needs"], one["archs"], one["key"]) for one in found)


def test_requests_are_recorded_once(make_spec, monkeypatch, tmp_path):
    trace = tmp_path / "trace"
    trace.mkdir()
    monkeypatch.setenv("FLASHINFER_JIT_TRACE", str(trace))
    monkeypatch.setenv("FLASHINFER_CPU_ARCH", "x86-64")
    spec, other = make_spec("one"), make_spec("two")
    for _ in range(3):
        build_jit_specs([spec, other])
    assert requests(trace) == [("one", {}, ["x86-64"], spec.key), ("two", {}, ["x86-64"], other.key)]


def test_a_load_is_recorded_with_its_needs_even_if_it_fails(make_spec, python, tmp_path):
    trace = tmp_path / "trace"
    trace.mkdir()
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


def test_a_trace_that_cannot_be_written_is_reported(make_spec, python, tmp_path):
    program = "import sys; from flashinfer import jit; print(jit.gen_jit_spec('tiny', [sys.argv[1]]).build().name)"
    done = python(program, make_spec().sources[0], FLASHINFER_JIT_TRACE=str(tmp_path / "gone"))
    assert done.stdout.strip() == "tiny" and "tiny is missing in the trace" in done.stderr
    assert not (tmp_path / "gone").exists()


def test_without_a_trace_nothing_is_encoded(make_spec, python):
    program = """
        import sys
        from flashinfer import jit
        jit.gen_jit_spec("tiny", [sys.argv[1]]).build_and_load()
        assert "flashinfer.jit.specjson" not in sys.modules
    """
    python(program, make_spec().sources[0])
