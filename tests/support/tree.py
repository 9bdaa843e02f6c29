"""A copy of the source tree, and processes that see it or an installed package instead of the checkout."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import torch

from .processes import python_path

ROOT = Path(__file__).resolve().parents[2]
_PARTS = (
    "flashinfer",
    "csrc",
    "include",
    "scripts",
    "pyproject.toml",
    "build_backend.py",
    "README.md",
    "LICENSE",
    ".gitignore",
)


def public_modules() -> list[str]:
    """Return the names of the package's public modules, from its files."""
    return sorted(module.name for module in pkgutil.iter_modules([str(ROOT / "flashinfer")]) if module.name[0] != "_")


def copy_tree(destination: Path) -> Path:
    """Copy the files of the package, without artifacts and caches."""
    destination.mkdir(parents=True)
    for part in _PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, destination / part, ignore=shutil.ignore_patterns("__pycache__", "data"))
        else:
            shutil.copy2(ROOT / part, destination / part)
    return destination


def clean_environment(**variables: str | Path) -> dict[str, str]:
    """Return the environment without variables that name this checkout or control the library."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "PYTHON"))}
    if path := python_path(*filter(None, [variables.pop("PYTHONPATH", None)])):
        kept["PYTHONPATH"] = path
    return {**kept, **{name: str(value) for name, value in variables.items()}}


def make_venv(folder: Path) -> Path:
    """Return the interpreter of an empty environment. It sees torch, but no editable install."""
    venv.EnvBuilder(symlinks=True).create(folder)
    seen = {str(Path(torch.__file__).parents[1]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site,) = folder.glob("lib/python3*/site-packages")
    # A path in a .pth file is searched last, and its own .pth files (editable installs) are not read.
    (site / "zz_host.pth").write_text("\n".join(sorted(seen)) + "\n")
    ninja = Path(sysconfig.get_path("scripts"), "ninja")
    if ninja.exists():  # as the package ninja installs it, which does not need PATH
        (folder / "bin" / "ninja").symlink_to(ninja)
    return folder / "bin" / "python"


def run(*command: str | Path, cwd: Path, **variables: str | Path) -> str:
    """Return the standard output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean_environment(**variables), capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout
