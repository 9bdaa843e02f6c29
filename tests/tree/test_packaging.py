"""Wheels and sdists, installed into empty environments and used outside the checkout."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ..support.tree import ROOT, copy_tree, make_venv, run

# pip is required but not imported here: importing it makes setuptools drop its own distutils for the whole
# process.
for needed in ("build", "hatchling"):
    pytest.importorskip(needed)

import build_backend  # noqa: E402 - needs hatchling

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

USE = """
import sys, torch, flashinfer
from flashinfer.jit import subscribe
events = []
subscribe(lambda event: events.append((event.kind, str(event.detail.get("path", "")))))
x, weight = torch.randn(3, 64), torch.randn(64)
got = flashinfer.rmsnorm(x, weight, eps=1e-6)
torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (64,), weight, eps=1e-6))
print(flashinfer.__file__, [path for kind, path in events if kind == "load"][0], sep="\\n")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packaging")


@pytest.fixture(scope="module")
def tree(place: Path) -> Path:
    """Copy the tree and add files that no distribution may contain."""
    tree = copy_tree(place / "tree")
    for name in ("data/aot/stray/stray.so", "flashinfer/__pycache__/env.cpython-311.pyc", "compile_commands.json"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("stray")
    return tree


def package(tree: Path, out: Path, *options: str) -> Path:
    """Build one distribution in an environment where importing torch fails."""
    no_torch = out.parent / "no_torch"
    no_torch.mkdir(exist_ok=True)
    (no_torch / "torch.py").write_text("raise ImportError('building a distribution must not need torch')")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options, ".", cwd=tree, PYTHONPATH=no_torch)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tree: Path, place: Path) -> Path:
    return package(tree, place / "sdist", "--sdist")


@pytest.fixture(scope="module")
def wheel(tree: Path, place: Path) -> Path:
    return package(tree, place / "wheel", "--wheel")


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files_below(root: Path, *folders: str) -> dict[str, bytes]:
    found = (path for folder in folders for path in (root / folder).rglob("*"))
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    }


def install(python: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=python.parent)


def test_the_sdist_has_the_sources_and_nothing_built(sdist, tree):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {*files_below(tree, "flashinfer", "csrc", "include", "scripts"), "pyproject.toml", "build_backend.py"}
    assert wanted | {"README.md", "LICENSE"} <= names
    assert not [name for name in names if "stray" in name or "__pycache__" in name or name.endswith("commands.json")]


def test_the_wheel_is_for_any_machine_and_carries_the_sources(wheel, tree):
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = contents(wheel)
    for name, content in files_below(tree, "flashinfer").items():
        assert inside.pop(name) == content
    for name, content in files_below(tree, "csrc", "include").items():
        assert inside.pop(f"flashinfer/data/{name}") == content
    left = {name.partition(".dist-info/")[2] for name in inside}
    assert left == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_gives_the_same_wheel(sdist, wheel, place):
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(place / "unpacked")
    (unpacked,) = (place / "unpacked").iterdir()
    assert package(unpacked, place / "from_sdist", "--wheel").read_bytes() == wheel.read_bytes()


@needs_compiler
def test_wheel_and_checkout_build_equal_modules(wheel, tree, place):
    python = make_venv(place / "venv_plain")
    install(python, wheel)
    workspace = place / "workspace"
    package_file, loaded = run(python, "-c", USE, cwd=place, FLASHINFER_WORKSPACE_DIR=workspace).split()
    assert Path(package_file).is_relative_to(place / "venv_plain") and Path(loaded).is_relative_to(workspace)
    # The contents of its sources identify a module, wherever they are, so nothing is compiled again.
    out = run(
        sys.executable, "-m", "flashinfer", "build", "norm_cpu", "--json",
        cwd=tree, FLASHINFER_WORKSPACE_DIR=workspace, FLASHINFER_CXX_LAUNCHER="false",
    )  # fmt: skip
    assert json.loads(out)[0]["how"] == "ready"
    assert run(python, "-m", "flashinfer", "list", cwd=place).splitlines()[0].startswith("name")


@needs_compiler
def test_a_wheel_with_modules_needs_no_compiler(place):
    tree = copy_tree(place / "tree_aot")
    script = ("scripts/build_aot.py", "--backend", "cpu", "--families", "norm", "--json")
    out = run(
        sys.executable, *script, cwd=tree, PYTHONPATH=tree, FLASHINFER_WORKSPACE_DIR=place / "workspace"
    )  # reuses the build of the previous test
    (row,) = json.loads(out)
    assert row["path"] == str(tree / "data" / "aot" / "norm_cpu" / "norm_cpu.so")
    wheel = package(tree, place / "wheel_aot", "--wheel", "-Caot=1")

    manifest = json.loads((tree / "data" / "aot" / "norm_cpu" / "manifest.json").read_text())
    tag = wheel.name.removesuffix(".whl").split("-", 2)[2]
    assert tag == f"py3-none-{build_backend.platform_tag([manifest], platform.machine())}"
    inside = contents(wheel)
    (metadata,) = (text.decode() for name, text in inside.items() if name.endswith("/WHEEL"))
    assert f"Tag: {tag}\n" in metadata and "Root-Is-Purelib: false" in metadata
    assert {name for name in inside if "/aot/" in name} == {
        f"flashinfer/data/aot/norm_cpu/{name}" for name in ("norm_cpu.so", "manifest.json")
    }

    python = make_venv(place / "venv_aot")
    install(python, wheel)
    environment = {"FLASHINFER_WORKSPACE_DIR": place / "never", "FLASHINFER_DISABLE_JIT": "1", "PATH": "/nowhere"}
    package_file, loaded = run(python, "-c", USE, cwd=place, **environment).split()
    assert Path(loaded).is_relative_to(Path(package_file).parent / "data" / "aot")
    assert not (place / "never").exists()


def snapshot(tree: Path) -> dict[str, tuple[int, int]]:
    paths = (path for path in tree.rglob("*") if "__pycache__" not in path.parts)
    return {
        str(path.relative_to(tree)): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths if path.is_file()
    }


def test_an_editable_install_is_the_checkout_and_survives_a_build(place):
    tree = copy_tree(place / "tree_editable")
    before = snapshot(tree)
    python = make_venv(place / "venv_editable")
    install(python, "-e", tree)
    package(tree, place / "wheel_editable", "--wheel")
    package(tree, place / "sdist_editable", "--sdist")
    assert snapshot(tree) == before

    ask = "from flashinfer.jit.modules.norm import gen_norm_module as g; import flashinfer; print(flashinfer.__file__, g('cpu').key)"
    file, key = run(python, "-c", ask, cwd=place).split()
    assert Path(file) == tree / "flashinfer" / "__init__.py"
    header = tree / "include" / "flashinfer" / "cpu" / "norm.h"
    header.write_text(header.read_text() + "// edited\n")
    assert run(python, "-c", ask, cwd=place).split()[1] != key


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """Make a directory of artifacts with one valid module."""
    source = tmp_path / "csrc" / "m.cc"
    source.parent.mkdir()
    source.write_text("source")
    module = tmp_path / "data" / "aot" / "m"
    module.mkdir(parents=True)
    (module / "m.so").write_text("binary")
    digests = {path: build_backend.file_digest(path) for path in (source, module / "m.so")}
    manifest = {"files": {"csrc/m.cc": digests[source]}, "sha256": digests[module / "m.so"], "requires": {}}
    (module / "manifest.json").write_text(json.dumps(manifest))
    return module.parent


def test_only_whole_and_current_artifacts_are_shipped(artifacts):
    assert list(build_backend.checked_manifests(artifacts)) == ["m"]
    (artifacts.parents[1] / "csrc" / "m.cc").write_text("edited")
    with pytest.raises(RuntimeError, match=r"older than csrc/m\.cc"):
        build_backend.checked_manifests(artifacts)
    (artifacts / "m" / "m.so").write_text("damaged")
    with pytest.raises(RuntimeError, match="is damaged"):
        build_backend.checked_manifests(artifacts)
    shutil.rmtree(artifacts / "m")
    with pytest.raises(RuntimeError, match="there is no module"):
        build_backend.checked_manifests(artifacts)


@pytest.mark.parametrize(
    "requires, wanted",
    [
        ([{}], "2_17"),
        ([{"GLIBC": "2.34"}, {"GLIBC": "2.4"}], "2_34"),
        ([{"GLIBC": "2.9"}, {"GLIBC": "2.32", "GLIBCXX": "3.4.26"}], "2_32"),
        ([{"GLIBC": "2.14", "GLIBCXX": "3.4.30"}], "2_35"),
        ([{"GLIBC": "2.14", "GLIBCXX": "3.4.9"}], "2_17"),
    ],
    ids=str,
)
def test_the_platform_tag_is_that_of_the_newest_symbol(requires, wanted):
    manifests = [{"requires": one} for one in requires]
    assert build_backend.platform_tag(manifests, "x86_64") == f"manylinux_{wanted}_x86_64"


def test_bad_settings(tmp_path):
    with pytest.raises(ValueError, match="aot: got 'yes', wanted 0 or 1"):
        build_backend.build_wheel(os.fspath(tmp_path), {"aot": "yes"})
    assert not list(tmp_path.iterdir()) and (ROOT / "pyproject.toml").exists()
