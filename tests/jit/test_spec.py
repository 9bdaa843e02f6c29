"""Specs are values, and their key covers every byte that matters."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer.jit import gen_jit_spec
from flashinfer.jit.module import JitSpec
from flashinfer.jit.modules._family import family_spec
from flashinfer.jit.modules.norm import gen_norm_module
from flashinfer.jit.spec import digest


def test_a_spec_is_a_value():
    first, second = gen_norm_module("cpu"), gen_norm_module("cpu")
    assert first == second and hash(first) == hash(second) and first.key == second.key
    assert "norm_cpu" in repr(first)
    with pytest.raises(AttributeError):
        first.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        dict(name="norm2_cpu"),
        dict(backend="cuda"),
        dict(namespace="other"),
        dict(config=(("A", 1),)),
        dict(coverage=(("dtype", ("float32",)),)),
        dict(cflags=("-O2",)),
        dict(ldflags=("-lm",)),
        dict(source_cflags=()),
        dict(include_paths=("/nowhere",), cuda_cflags=("-g",)),
        dict(sources=("csrc/norm_cpu.cc",)),
        dict(config_header="other.h"),
        dict(split=True),
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_changes_the_key(change):
    spec = gen_norm_module("cpu")
    changed = JitSpec(**{**{name: getattr(spec, name) for name in spec.__dataclass_fields__}, **change})
    assert changed.key != spec.key


@pytest.mark.parametrize(
    "variable, value",
    [("FLASHINFER_EXTRA_CFLAGS", "-DX=1"), ("FLASHINFER_EXTRA_LDFLAGS", "-lm"), ("FLASHINFER_JIT_DEBUG", "1")],
)
def test_flags_of_the_environment_change_the_key(variable, value, monkeypatch):
    before = gen_norm_module("cpu").key
    monkeypatch.setenv(variable, value)
    assert gen_norm_module("cpu").key != before


@pytest.mark.parametrize(
    "variable, value",
    [("FLASHINFER_JIT_VERBOSE", "1"), ("MAX_JOBS", "7"), ("FLASHINFER_CXX_LAUNCHER", "ccache"), ("HOME", "/nowhere"),
     ("FLASHINFER_WORKSPACE_DIR", "/nowhere")],
)  # fmt: skip
def test_variables_that_change_no_byte_change_no_key(variable, value, monkeypatch):
    before = gen_norm_module("cpu").key
    monkeypatch.setenv(variable, value)
    assert gen_norm_module("cpu").key == before


def test_contents_count_and_times_do_not(make_spec):
    spec = make_spec()
    before = spec.key
    header = spec.source_paths()[0].replace("unit.cc", "unit.h")
    status = os.stat(header)
    os.utime(header, (0, 0))
    assert spec.key == before
    with open(header, "w") as file:
        file.write("#define ANSWER 43\n")
    os.utime(header, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert spec.key != before, "an edit of the same length with a restored time must be seen"


def test_the_folder_of_the_sources_does_not_count(make_spec, tmp_path):
    key = make_spec().key
    os.rename(tmp_path / "src", tmp_path / "moved")
    moved = gen_jit_spec("tiny", [tmp_path / "moved" / "tiny" / "unit.cc"])
    assert moved.key == key and set(moved.files()) == {"<0>/unit.cc", "<0>/unit.h"}


def test_values_of_an_axis_are_sorted_by_type():
    spec = gen_jit_spec("a", ["a.cc"], coverage={"head_dim": [128, 64, 256, 64], "mask": ["b", "a"]})
    assert dict(spec.coverage) == {"head_dim": (64, 128, 256), "mask": ("a", "b")}


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


def _same(first: object, second: object) -> bool:
    """Return whether two values are equal. True differs from 1."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return first == second


@given(PLAIN, PLAIN)
def test_two_values_never_encode_alike(first, second):
    assert (digest(first) == digest(second)) == _same(first, second)


def test_a_split_source_has_a_unit_for_each_combination(tmp_path):
    coverage = {"a": ["x", "y"], "b": [1, 2, 3]}
    spec = replace(gen_jit_spec("split", ["/one.cc", "/two.cu"], coverage=coverage), split=True)
    parts = {f"/two.{part}.cu": ("/two.cu", f"-DFLASHINFER_PART={part}") for part in range(6)}
    assert spec.units() == {"/one.cc": ("/one.cc",), **parts}
    assert list(replace(spec, split=False).units()) == ["/one.cc", "/two.cu"]
    assert list(spec.covering({"a": ["x"], "b": [3]}).units()) == ["/one.cc", "/two.cu"]
    with pytest.raises(ValueError, match=r"two files with one stem in \['two.0', 'two.0', 'two.1'"):
        replace(spec, sources=("/two.0.cc", "/two.cu"))


def test_neighbouring_words_do_not_run_together():
    assert digest(["a", "strb"]) != digest(["astr", "b"]) != digest(["astrb"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(name="a/b"), "name: got 'a/b'"),
        (dict(name=""), "name: got ''"),
        (dict(name="a", sources=[]), "got none, wanted at least one file"),
        (dict(name="a", sources=["x/u.cc", "y/u.cu"]), "two files with one stem"),
        (dict(name="a", backend="tpu"), "backend: got 'tpu', wanted one of cpu, cuda"),
        (dict(name="a", extra_cflags=["-DA\n-DB"]), "newline or NUL"),
        (dict(name="a", sources=["x\n.cc"]), "newline or NUL"),
        (dict(name="a", namespace="x\0y"), "newline or NUL"),
        (dict(name="a", coverage={"dtype": []}), "dtype: got no value"),
        (
            dict(name="a", coverage={"head_dim": [64, "128"]}),
            r"head_dim: got .* wanted only strings or only integers",
        ),
        (dict(name="a", coverage={"head_dim": [True]}), r"head_dim: got \['True'\], wanted only strings"),
    ],
)
def test_bad_specs(arguments, message):
    with pytest.raises(ValueError, match=message):
        gen_jit_spec(**{"sources": ["a.cc"], **arguments})


def test_element_types_are_the_familys_own():
    assert dict(gen_jit_spec("a", ["a.cc"], coverage={"dtype": ["int7"]}).coverage) == {"dtype": ("int7",)}
    with pytest.raises(ValueError, match="dtypes: got int7, wanted a subset of float32, float16, bfloat16"):
        gen_norm_module("cpu", ["int7"])


def test_unknown_backend_of_a_family():
    with pytest.raises(ValueError, match="backend: got 'rocm', wanted one of cpu, cuda"):
        family_spec("norm", "rocm")


@pytest.mark.parametrize(
    "how",
    [
        lambda path: dict(extra_include_paths=[path]),
        lambda path: dict(extra_cflags=[f"-I{path}"]),
        lambda path: dict(extra_cflags=["-I", str(path)]),
        lambda path: dict(extra_cflags=["-iquote", str(path)]),
    ],
    ids=["extra_include_paths", "-Ipath", "-I path", "-iquote path"],
)
def test_headers_count_for_every_way_to_name_their_directory(make_spec, tmp_path, how):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.h").write_text("#define ANSWER 1\n")
    files = {"unit.cc": '#include "mine.h"\nint answer = ANSWER;\n'}
    spec = make_spec(files=files, **how(tmp_path / "mine"))
    before = spec.key
    assert spec.build().path.exists(), "the compiler finds it too"
    (tmp_path / "mine").rename(tmp_path / "yours")
    moved = make_spec(files=files, **how(tmp_path / "yours"))
    assert moved.key == before, "its folder does not count"
    (tmp_path / "yours" / "mine.h").write_text("#define ANSWER 2\n")
    assert moved.key != before


def test_headers_of_the_environments_flags_count(make_spec, tmp_path, monkeypatch):
    (tmp_path / "mine.h").write_text("#define ANSWER 1\n")
    monkeypatch.setenv("FLASHINFER_EXTRA_CFLAGS", f"-I{tmp_path}")
    spec = make_spec(files={"unit.cc": '#include "mine.h"\nint answer = ANSWER;\n'})
    before = spec.key
    (tmp_path / "mine.h").write_text("#define ANSWER 2\n")
    assert spec.key != before


def test_linked_files_count(make_spec, tmp_path):
    archive = tmp_path / "libmine.a"
    archive.write_bytes(b"!<arch>\n")
    spec = make_spec(extra_ldflags=["-lm", str(archive)])
    before = spec.key
    archive.rename(tmp_path / "libyours.a")
    moved = make_spec(extra_ldflags=["-lm", str(tmp_path / "libyours.a")])
    assert moved.key == before and moved.fields()["ldflags"] == ["-lm", "<linked>/1"]
    (tmp_path / "libyours.a").write_bytes(b"!<arch>\n\n")
    assert moved.key != before


@pytest.mark.parametrize("flag", ["-include", "-includex.h", "-imacros", "@flags"])
def test_flags_that_read_files_no_key_covers(make_spec, flag, monkeypatch):
    with pytest.raises(ValueError, match=f"flags: got '{flag}', whose file no key would cover"):
        make_spec(extra_cflags=[flag, "x.h"])
    monkeypatch.setenv("FLASHINFER_EXTRA_CUDAFLAGS", flag)
    with pytest.raises(ValueError, match="no key would cover"):
        make_spec(extra_cflags=[])
