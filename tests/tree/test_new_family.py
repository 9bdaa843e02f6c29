"""A new family needs only new files: those in ``new_family/`` are copied over the tree and used."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..support.tree import ROOT, clean_environment, copy_tree, run

FILES = Path(__file__).with_name("new_family")

USE = """
import sys, torch, flashinfer
from flashinfer.jit import subscribe
device, events = sys.argv[1], []
subscribe(lambda event: events.append(event))
factor = torch.tensor(0.3, device=device)
for power in (1, 2):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for size in (0, 3, 5 * 1001, 4096):
            x = torch.randn(size, device=device).to(dtype)
            want = x.float()
            for _ in range(power):
                want = want * factor
            assert torch.equal(flashinfer.scaled(x, 0.3, power), want.to(dtype)), (power, dtype, size)
for arguments, message in (
    ((torch.randn(3, 4, device=device).t(), 2.0), "scaled: input: is not contiguous, wanted a contiguous tensor"),
    ((x, 2.0, 4), "scaled: power: got 4, wanted one of 1, 2, 3"),
):
    try:
        flashinfer.scaled(*arguments)
    except ValueError as err:
        assert str(err) == message, err
    else:
        raise AssertionError("a bad argument was accepted")
kinds = [event.kind for event in events if event.kind != "wait"]
print(*kinds, next(event.detail["path"] for event in events if event.kind == "load"))
"""


def files() -> list[Path]:
    found = (path.relative_to(FILES) for path in FILES.rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree and add the family, without replacing any file."""
    tree = copy_tree(tmp_path_factory.mktemp("family") / "tree")
    for path in files():
        assert not (tree / path).exists(), "a family adds only files of its own"
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(FILES / path, tree / path)
    run(sys.executable, "scripts/init_stub.py", cwd=tree, PYTHONPATH=tree)
    return tree


def use(tree: Path, workspace: Path, device: str = "cpu") -> tuple[list[str], Path]:
    command = (sys.executable, "-c", USE, device)
    *kinds, path = run(*command, cwd=tree, PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=workspace).split()
    return kinds, Path(path)


def build_aot(tree: Path, workspace: Path, *options: str) -> dict[str, dict]:
    command = (sys.executable, "scripts/build_aot.py", "--families", "scale", "--json", *options)
    rows = json.loads(run(*command, cwd=tree, PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=workspace))
    return {row["name"]: row for row in rows}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_on_first_use_and_then_ahead_of_time(tree, tmp_path):
    workspace = tmp_path / "workspace"
    kinds, path = use(tree, workspace)
    assert kinds == ["miss", "compile", "load"] and path.is_relative_to(workspace)

    empty = tmp_path / "empty"
    row = build_aot(tree, empty, "--backend", "cpu", "--powers", "1 2")["scale_cpu"]
    assert row["how"] == "built" and Path(row["path"]) == tree / "data" / "aot" / "scale_cpu" / "scale_cpu.so"
    manifest = json.loads(Path(row["path"]).with_name("manifest.json").read_text())
    assert manifest["coverage"]["power"] == ["1", "2"], "its axis is an option of the command"
    kinds, path = use(tree, empty)
    assert kinds == ["hit", "load"] and path == Path(row["path"])


def test_its_axis_is_checked_by_the_command(tree, tmp_path):
    command = [sys.executable, "scripts/build_aot.py", "--powers", "1,7", "--dry-run"]
    environment = clean_environment(PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment)
    assert done.returncode == 2 and "--powers: got 7, wanted some of 1, 2, 3" in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_its_cuda_modules_build_without_a_gpu(tree, tmp_path):
    """Hopper's kernels are built only for Hopper, and left out for other archs."""
    cuda = ("--backend", "cuda", "--dtypes", "float16", "--powers", "1", "--out-dir", str(tmp_path / "out"))
    rows = build_aot(tree, tmp_path, *cuda, "--cuda-arch", "8.0 9.0a")
    assert {name: (row["archs"], row["how"]) for name, row in rows.items()} == {
        "scale_cuda": (["8.0", "9.0a"], "built"),
        "scale_sm90a": (["9.0a"], "built"),
    }
    assert [*build_aot(tree, tmp_path, *cuda, "--cuda-arch", "8.0", "--dry-run")] == ["scale_cuda"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tree, tmp_path):
    """On Hopper the module has Hopper's kernels."""
    kinds, path = use(tree, tmp_path / "workspace", "cuda")
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert kinds == ["miss", "compile", "load"] and path.stem == ("scale_sm90a" if hopper else "scale_cuda")


def test_the_documents_name_its_files():
    """The steps of CONTRIBUTING.md name these files."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in files():
        assert f"`{path}`" in text, f"CONTRIBUTING.md does not name {path}"
