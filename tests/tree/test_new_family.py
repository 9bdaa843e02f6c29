"""A family is added by adding its files: those in ``new_family/`` are laid over a copy of the tree, and used."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ..support.tree import ROOT, copy_tree, run

FILES = Path(__file__).with_name("new_family")

USE = """
import torch, flashinfer
from flashinfer.jit import subscribe
events = []
subscribe(lambda event: events.append(event))
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    x = torch.randn(3, 1001).to(dtype)
    assert torch.equal(flashinfer.scaled(x, 0.3), (x.double() * torch.tensor(0.3).double()).float().to(dtype))
try:
    flashinfer.scaled(x.t(), 2.0)
except ValueError as err:
    assert str(err) == "scaled: input: is not contiguous, wanted a contiguous tensor", err
else:
    raise AssertionError("a bad argument was accepted")
print(*(event.kind for event in events), next(event.detail["path"] for event in events if event.kind == "load"))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("family") / "tree")
    for path in (path for path in FILES.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        place = tree / path.relative_to(FILES)
        assert not place.exists(), "a family has files of its own only"
        shutil.copyfile(path, place)
    return tree


def use(tree: Path, workspace: Path) -> tuple[list[str], Path]:
    *kinds, path = run(sys.executable, "-c", USE, cwd=tree, PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=workspace).split()
    return kinds, Path(path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_on_first_use_and_then_ahead_of_time(tree, tmp_path):
    workspace = tmp_path / "workspace"
    kinds, path = use(tree, workspace)
    assert kinds == ["miss", "compile", "load"] and path.is_relative_to(workspace)

    empty = tmp_path / "empty"
    command = (sys.executable, "scripts/build_aot.py", "--families", "scale", "--backend", "cpu", "--json")
    (row,) = json.loads(run(*command, cwd=tree, PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=empty))
    assert (row["name"], row["how"]) == ("scale_cpu", "built")
    assert Path(row["path"]) == tree / "data" / "aot" / "scale_cpu" / "scale_cpu.so"
    kinds, path = use(tree, empty)
    assert kinds == ["hit", "load"] and path == Path(row["path"])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_its_cuda_module_builds_without_a_gpu(tree, tmp_path):
    command = (sys.executable, "scripts/build_aot.py", "--families", "scale", "--backend", "cuda", "--json")
    out = run(*command, "--cuda-arch", "8.0", cwd=tree, PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=tmp_path)
    (row,) = json.loads(out)
    assert (row["name"], row["archs"], row["how"]) == ("scale_cuda", ["8.0"], "built")


def test_the_documents_name_its_files():
    """CONTRIBUTING.md's steps are these files."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (path for path in FILES.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        assert f"`{path.relative_to(FILES)}`" in text, f"CONTRIBUTING.md does not name {path.relative_to(FILES)}"
