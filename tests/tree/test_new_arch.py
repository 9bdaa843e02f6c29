"""Kernels for one more architecture need only new files: those in ``new_arch/`` are copied over the tree and built.

``norm_sm100a.cu`` is a kernel for 10.0a of a family of the tree, ``scale_sm100a.cu`` one of ``new_family/``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.device_code import device_archs
from ..support.tree import ROOT, clean_environment, copy_tree, run

FILES = Path(__file__).with_name("new_arch")
FAMILY = Path(__file__).with_name("new_family")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")

# Modules that GPUs of some capabilities load, and the reasons why others refuse the module for 10.0a. GPUS is replaced.
LOAD = """
import json
from flashinfer.jit import native
from flashinfer.jit.resolve import look_up
from flashinfer.jit.machine import target
from flashinfer.jit.modules import Matrix, matrix_specs
from flashinfer.jit.modules.norm import gen_norm_module
portable = gen_norm_module("cuda", ["bfloat16"])
(spec,) = [one for one in matrix_specs(Matrix(dtypes=("bfloat16",)), ["norm"]) if one.archs]
assert spec.coverage == portable.coverage and spec.namespace == portable.namespace
result = {}
for gpus in ((), ((10, 0),), ((10, 3),), ((9, 0),), ((9, 0), (10, 0))):
    native.visible_gpus = target.visible_gpus = lambda: gpus
    lookup = look_up(spec)
    result[" ".join(f"{major}.{minor}" for major, minor in gpus)] = {
        "module": native.module_for_gpus(portable).name,
        "reasons": [] if lookup.artifact is not None else [one.partition(": ")[2] for one in lookup.reasons],
        "probe": spec.probe().reason,
    }
print(json.dumps(result))
"""


def overlay(folder: Path, tree: Path) -> list[Path]:
    """Copy the files of a folder over a tree and return their names. None replaces a file."""
    names = sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    for name in names:
        assert not (tree / name).exists(), f"{name}: only new files are added"
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, tree / name)
    return names


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("arch") / "tree")
    overlay(FILES, tree)
    return tree


def build_aot(tree: Path, workspace: Path, family: str, archs: str, *options: str) -> tuple[dict[str, dict], str]:
    """Return the rows of an AOT build of a family by module, and what it wrote to standard error."""
    command = [sys.executable, "scripts/build_aot.py", "--families", family, "--backend", "cuda", "--json"]
    environment = clean_environment(PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=workspace)
    command += ["--dtypes", "bfloat16", "--cuda-arch", archs, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}, done.stderr


@needs_nvcc
def test_a_kernel_of_a_family_of_the_tree(tree, tmp_path):
    """The module is built for its arch only, listed, loaded by its GPUs and refused by others with the reason."""
    rows, _ = build_aot(tree, tmp_path, "norm", "9.0a 10.0a", "--dry-run")
    assert {name: row["archs"] for name, row in rows.items()} == {
        "norm_cuda": ["9.0a", "10.0a"],
        "norm_sm100a": ["10.0a"],
    }
    rows, _ = build_aot(tree, tmp_path, "norm", "9.0a 10.0a", "--shard", "2/2")  # the second one only
    library = Path(rows["norm_sm100a"]["path"])
    assert device_archs(library) == rows["norm_sm100a"]["archs"] == ["10.0a"]
    assert b"rms_norm_wide_kernel" in library.read_bytes()

    seen = dict(PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=tmp_path)
    listed = json.loads(run(sys.executable, "-m", "flashinfer", "list", "--json", cwd=tree, **seen))
    assert [(row["name"], row["where"]) for row in listed if row["archs"] == ["10.0a"]] == [
        ("norm_sm100a", str(library.parent))
    ]

    on = json.loads(run(sys.executable, "-c", LOAD, cwd=tree, **seen))
    assert {gpus: row["module"] for gpus, row in on.items()} == {
        "": "norm_cuda",  # nothing is launched
        "10.0": "norm_sm100a",
        "10.3": "norm_cuda",
        "9.0": "norm_cuda",
        "9.0 10.0": "norm_cuda",  # one kernel of an operator serves all GPUs
    }
    for gpu in ("9.0", "10.3"):
        assert on[gpu]["reasons"] == [f"compiled for 10.0a, this machine has a GPU of {gpu}"]
        assert on[gpu]["probe"] == f"module 'norm_sm100a' has kernels only for 10.0a, this machine has {gpu}a"
    assert on["10.0"]["reasons"] == []


def test_other_archs_leave_it_out(tree, tmp_path):
    rows, said = build_aot(tree, tmp_path, "norm", "8.0 9.0a", "--dry-run")
    assert [*rows] == ["norm_cuda"]
    assert "left out: module 'norm_sm100a' has kernels only for 10.0a, the request names 8.0 9.0a" in said
    rows, said = build_aot(tree, tmp_path, "norm", "10.0a", "--dry-run")
    assert [*rows] == ["norm_cuda", "norm_sm100a"] and "left out" not in said


@needs_nvcc
def test_a_kernel_of_a_new_family(tree, tmp_path):
    """A family that is new itself gets the kernel in the same way."""
    both = copy_tree(tmp_path / "tree")
    overlay(FAMILY, both)
    run(sys.executable, "scripts/init_stub.py", cwd=both, PYTHONPATH=both)
    overlay(FILES, both)
    run(sys.executable, "scripts/init_stub.py", "--check", cwd=both, PYTHONPATH=both)
    rows, _ = build_aot(both, tmp_path / "workspace", "scale", "9.0a 10.0a", "--dry-run")
    assert {name: row["archs"] for name, row in rows.items()} == {
        "scale_cuda": ["9.0a", "10.0a"],
        "scale_sm90a": ["9.0a"],
        "scale_sm100a": ["10.0a"],
    }
    options = ("--powers", "1", "--shard", "2/3")
    rows, _ = build_aot(both, tmp_path / "workspace", "scale", "9.0a 10.0a", *options)
    library = Path(rows["scale_sm100a"]["path"])
    assert device_archs(library) == ["10.0a"] and b"scale_pieces" in library.read_bytes()


def test_the_documents_name_its_files():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (FILES / "csrc").iterdir():
        assert f"`{path.name}`" in text, f"CONTRIBUTING.md does not name {path.name}"
