"""scripts/build_aot.py: all modules ahead of time, in one run, and none twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.jit.modules import Axis, Matrix, axes, families, family, matrix_specs, some_of
from flashinfer.jit.resolve import look_up

from ..support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "build_aot.py"


@pytest.fixture
def two_modules(aot, make_spec, monkeypatch):
    specs = [make_spec("one"), make_spec("two")]
    monkeypatch.setattr(aot, "matrix_specs", lambda matrix, names: specs)
    return specs


def rows(capsys) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def test_builds_then_reuses(aot, two_modules, tmp_path, compilers_started, capsys):
    out = tmp_path / "out"
    assert aot.main(["--out-dir", str(out), "--json"]) == 0
    first = rows(capsys)
    assert {row["how"] for row in first.values()} == {"built"} and compilers_started() == 2
    assert (out / "one" / "one.so").exists() and first["one"]["size"] > 0 and first["one"]["seconds"] > 0
    assert aot.main(["--out-dir", str(out), "--json"]) == 0
    assert {row["how"] for row in rows(capsys).values()} == {"reused"} and compilers_started() == 2


def test_modules_of_the_jit_are_copied(aot, two_modules, tmp_path, compilers_started, capsys):
    two_modules[0].build()
    out = tmp_path / "aot"
    assert aot.main(["--out-dir", str(out), "--dry-run", "--json"]) == 0
    assert {name: row["how"] for name, row in rows(capsys).items()} == {"one": "copy", "two": "build"}
    assert not out.exists() and compilers_started() == 1, "a dry run builds nothing and writes nothing"
    assert aot.main(["--out-dir", str(out)]) == 0
    assert compilers_started() == 2 and look_up(two_modules[1]).artifact.directory == out / "two"
    two_modules[1].build()
    assert compilers_started() == 2, "modules built ahead of time are not built again"


def test_a_report_of_the_build_and_of_the_one_that_reuses(aot, two_modules, tmp_path, capsys):
    page, arguments = tmp_path / "build.html", ["--out-dir", str(tmp_path / "out"), "--report"]
    assert aot.main([*arguments, str(page)]) == 0
    text = page.read_text()
    assert "2 built" in text and '"module": "one"' in text and '"kind": "compile"' in text and "unit.cc" in text
    assert aot.main([*arguments, str(page)]) == 0
    assert "2 reused" in page.read_text() and "nothing was compiled" in page.read_text()


def test_a_report_that_cannot_be_written_fails_after_the_build(aot, two_modules, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    assert aot.main(["--out-dir", str(tmp_path / "out"), "--report", str(tmp_path / "folder")]) == 1
    assert "the report cannot be written" in capsys.readouterr().err and (tmp_path / "out" / "one").exists()


def test_dry_run_says_why(aot, make_spec, monkeypatch, tmp_path, capsys):
    spec = make_spec()
    monkeypatch.setattr(aot, "matrix_specs", lambda matrix, names: [spec])
    aot.main(["--out-dir", str(tmp_path / "out")])
    capsys.readouterr()

    def why() -> str:
        aot.main(["--out-dir", str(tmp_path / "out"), "--dry-run", "--json"])
        return rows(capsys)["tiny"]["why"]

    assert why() == "up to date"
    Path(spec.source_paths()[0]).with_name("unit.h").write_text("#define ANSWER 7\n")
    assert why() == "changed: <0>/unit.h"
    Path(spec.source_paths()[0]).with_name("unit.h").write_text("#define ANSWER 42\n")
    aot.main(["--out-dir", str(tmp_path / "out"), "--dry-run", "--cpu-arch", "x86-64", "--json"])
    assert "archs: " in rows(capsys)["tiny"]["why"]


def test_one_broken_module(aot, make_spec, monkeypatch, tmp_path, capsys):
    specs = [make_spec("bad", {"unit.cc": "#error on purpose\n"}), make_spec("good")]
    monkeypatch.setattr(aot, "matrix_specs", lambda matrix, names: specs)
    assert aot.main(["--out-dir", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "FAILED bad:" in printed.err.splitlines()[-1] and "on purpose" in printed.err.splitlines()[-1]
    assert (tmp_path / "out" / "good" / "good.so").exists() and not (tmp_path / "out" / "bad").exists()
    assert "failed" in printed.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--families", "nothing"], "got nothing, wanted some of"),
        (["--backend", "tpu"], "got tpu, wanted some of cpu, cuda"),
        (["--cuda-arch", "sm_90"], "'sm_90' is not an arch"),
        (["--cpu-arch", "i386"], "invalid choice"),
        (["--dtypes", "int8"], "got int8, wanted some of"),
        (["--head-dims", "x"], "wanted positive numbers"),
        (["--head-dims", "192:"], "wanted positive numbers, or pairs as 192:128"),
        (["--kv-dtypes", "int8"], "got int8, wanted some of same, float8_e4m3fn"),
        (["--variants", "sigmoid"], "got sigmoid, wanted some of default, soft_cap"),
        (["--attention-form", "both"], "got 'both', wanted one of specialised, dispatching"),
        (["--jobs", "0"], "wanted a positive number"),
        *(
            (["--shard", text], f"got '{text}', wanted I/N")
            for text in ("0/2", "3/2", "1", "a/b", "1/0", "x/2", "1/2/3")
        ),
        (["--report", "/none/build.html"], "--report: wanted a file in an existing directory"),
        (["--report", "build.html", "--dry-run"], "existing directory, without --dry-run"),
    ],
)
def test_bad_arguments(aot, arguments, message, capsys):
    try:
        code = aot.main(arguments)
    except SystemExit as caught:  # argparse detects some errors itself
        code = caught.code
    assert code == 2 and message in capsys.readouterr().err


def test_shards_are_the_whole_matrix_each_module_once(aot, tmp_path, capsys):
    arguments = ["--backend", "cpu", "--dry-run", "--json", "--out-dir", str(tmp_path / "out")]
    aot.main(arguments)
    whole = [row["name"] for row in json.loads(capsys.readouterr().out)]
    shards = []
    for number in (1, 2, 3):
        assert aot.main([*arguments, "--shard", f"{number}/3"]) == 0
        shards.append([row["name"] for row in json.loads(capsys.readouterr().out)])
    assert sorted(name for names in shards for name in names) == sorted(whole) and len(whole) > 6
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert aot.main([*arguments, "--shard", "1000/1000"]) == 0
    assert json.loads(capsys.readouterr().out) == [], "an empty shard is no error"


def test_without_a_gpu_it_says_how_to_cross_build(aot, two_modules, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "visible_gpus", lambda: ())
    monkeypatch.setattr("flashinfer.jit.machine.target.visible_gpus", lambda: ())
    assert aot.main(["--out-dir", str(tmp_path / "out"), "--dry-run"]) == 0
    assert '--cuda-arch "9.0a 8.0"' in capsys.readouterr().err
    assert aot.main(["--out-dir", str(tmp_path / "out"), "--backend", "cuda"]) == 1
    assert "FLASHINFER_CUDA_ARCH_LIST" in capsys.readouterr().err


def test_the_matrix():
    specs = matrix_specs(Matrix())
    names = [spec.name for spec in specs]
    assert names == sorted(set(names)), "names are unique"
    assert {spec.name.rsplit("_", 1)[1] for spec in specs} == {"cpu", "cuda", "sm90a"}
    assert matrix_specs(Matrix(dtypes=("bfloat16",)), ["norm"])[0].coverage == (("dtype", ("bfloat16",)),)
    assert all(name.split("_")[0] in {f.split("_")[0] for f in families()} for name in names)
    with pytest.raises(ValueError, match="family: got 'nothing', wanted one of"):
        family("nothing")


def test_axes_are_the_families_own(monkeypatch):
    """An axis that two families share is one object. A name with two meanings is an error."""
    assert [axis.name for axis in axes(["norm"])] == ["dtypes"] and axes(["page"]) == ()
    assert {"dtypes", "head_dims", "variants"} < {axis.name for axis in axes()} < {*Matrix()}
    with pytest.raises(TypeError, match="Matrix: got tiles, wanted some of backends, "):
        Matrix(tiles=("64",))
    monkeypatch.setattr(family("page"), "AXES", (Axis("dtypes", ("x",), some_of("x"), "others"),), raising=False)
    with pytest.raises(ValueError, match="axis 'dtypes' of family '.*': got a second axis of that name"):
        axes()


def planned(aot, capsys, *arguments: str) -> set[str]:
    """Return the CPU attention modules that a dry run names."""
    assert aot.main(["--backend", "cpu", "--families", "decode,prefill", "--dry-run", "--json", *arguments]) == 0
    return set(rows(capsys))


def test_attention_in_the_matrix(aot, capsys):
    """Every combination of the options' values is a module of its own, or part of one module per family."""
    names = planned(aot, capsys)
    assert {"decode_f32_d64_cpu", "prefill_bf16_d128_cpu", "prefill_f16_d256_cpu"} < names and len(names) == 18
    some = ("--dtypes", "bfloat16", "--head-dims", "96 192:128", "--kv-dtypes", "same,float8_e5m2")
    names = planned(aot, capsys, *some, "--variants", "default,rope+soft_cap")
    assert names == {
        f"{family}_bf16{kv}_d{dims}{variant}_cpu"
        for family in ("decode", "prefill")
        for kv in ("", "_kv_e5m2")
        for dims in ("96", "192_128")
        for variant in ("", "_rope_soft_cap")
    }
    assert planned(aot, capsys, *some, "--attention-form", "dispatching") == {"decode_cpu", "prefill_cpu"}
    (one, _) = matrix_specs(
        Matrix(backends=("cpu",), dtypes=("float32",), head_dims=("64", "128"), attention_form=("dispatching",)),
        ["decode", "prefill"],
    )
    assert dict(one.coverage) == {
        "dtypes": ("float32:float32:float32",),
        "head_dims": ("128", "64"),
        "variants": ("default",),
    }
    assert aot.main(["--backend", "cuda", "--cuda-arch", "8.0", "--head-dims", "72", "--dry-run"]) == 2
    assert "head_dim: got 72, wanted one of 64, 128, 256, 192:128" in capsys.readouterr().err
    matrix = Matrix(backends=("cuda",), dtypes=("bfloat16",), head_dims=("128", "512"))
    names = ["prefill_bf16_d128_cuda", "prefill_bf16_d512_cuda", "prefill_bf16_d128_sm90a"]
    assert sorted(spec.name for spec in matrix_specs(matrix, ["prefill"])) == sorted(names)
    assert (
        matrix_specs(Matrix(backends=("cuda",), dtypes=("float32",), attention_form=("dispatching",)), ["decode"]) == []
    )


def test_the_page_about_attention_modules(load_script, tmp_path, make_spec, capsys):
    """The page names exactly the modules of the default matrix. The script makes it from artifacts."""
    page = (ROOT / "docs" / "attention-modules.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| [^|]+ \| \d+ \| \d+\.\d \|$", page, re.MULTILINE)
    assert names == [spec.name for spec in matrix_specs(Matrix(), ["decode", "prefill"])]
    script = load_script("attention_table")
    artifact = make_spec("decode_tiny").build()
    make_spec("other").build()
    for name in ("decode_tiny", "other"):
        (found,) = (tmp_path / "workspace" / "artifacts" / name).glob("*/*")
        shutil.copytree(found, tmp_path / "out" / name)
    (tmp_path / "out" / "decode_broken").mkdir()
    assert script.main([str(tmp_path / "out")]) == 0
    size, seconds = artifact.manifest["size"] / 1024, artifact.manifest["seconds"]
    row = f"| `decode_tiny` | {artifact.archs[0]} | {size:.0f} | {seconds:.1f} |"
    assert capsys.readouterr().out == page[: page.index("| `")] + row + "\n"
    with pytest.raises(SystemExit):
        script.main([str(tmp_path / "nowhere")])
    assert "wanted directories" in capsys.readouterr().err


def test_reuse_needs_no_torch_and_no_compiler(tmp_path, workspace, compilers_started):
    """Run the whole script twice in processes of their own, with a real family."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    command = [
        sys.executable,
        str(SCRIPT),
        "--families",
        "norm",
        "--backend",
        "cpu",
        "--out-dir",
        str(tmp_path / "out"),
    ]
    first = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert first.returncode == 0 and compilers_started() == 2, first.stderr
    second = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert second.returncode == 0 and "reused" in second.stdout and compilers_started() == 2
    imported = {line.rsplit("|", 1)[1].strip() for line in second.stderr.splitlines() if line.startswith("import time")}
    assert "flashinfer.jit.build" in imported and not {"torch", "rich"} & imported


def test_the_script_builds_the_tree_that_it_stands_in(tmp_path):
    """The script uses its own tree although another one is installed, here by PYTHONPATH."""
    tree = tmp_path / "tree"
    for part in ("flashinfer", "csrc", "include", "scripts"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    source = tree / "csrc" / "norm.cc"
    source.write_text(source.read_text() + "// another tree\n")
    command = [
        sys.executable,
        str(tree / "scripts/build_aot.py"),
        "--families",
        "norm",
        "--backend",
        "cpu",
        "--dry-run",
    ]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0 and run.stderr.startswith(f"{tree}/data/aot: 1 "), run.stderr
