"""PEP 517 and PEP 660 hooks of hatchling. A wheel also gets the sources of all modules.

    pip wheel .                # any machine; modules are compiled on first use
    pip wheel . -C aot=1       # with the modules of data/aot, for machines like the one that built them

An installed package has ``csrc``, ``include`` and ``aot`` in ``flashinfer/data``, where ``flashinfer/env.py``
finds them. An editable install has no such copy: it is the checkout. Nothing is written into the tree.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from hatchling.build import *  # noqa: F403 - the frontend decides which hooks are called
from hatchling.builders.wheel import WheelBuilder

SOURCES = ("csrc", "include")

# libstdc++'s newest symbols, and the glibc of the first mainstream distributions that ship them. The tag
# promises that the wheel works on distributions with that glibc (PEP 600), so they must have both.
GLIBC_OF_GLIBCXX = {
    (3, 4, 25): (2, 28),  # gcc 8
    (3, 4, 26): (2, 31),  # gcc 9, 10
    (3, 4, 29): (2, 34),  # gcc 11
    (3, 4, 30): (2, 35),  # gcc 12
    (3, 4, 31): (2, 38),  # gcc 13
    (3, 4, 33): (2, 39),  # gcc 14
    (3, 4, 34): (2, 41),  # gcc 15
}


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Write a wheel. The config setting ``aot=1`` adds the modules of ``data/aot``."""
    builder = _Wheel(Path.cwd(), _aot_setting(config_settings or {}))
    return os.path.basename(next(builder.build(directory=wheel_directory, versions=["standard"])))


def _aot_setting(settings: dict[str, Any]) -> bool:
    value = str(settings.get("aot", "0"))
    if value not in ("0", "1"):
        raise ValueError(f"config setting aot: got {value!r}, wanted 0 or 1")
    return value == "1"


class _Wheel(WheelBuilder):
    def __init__(self, root: Path, aot: bool) -> None:
        super().__init__(str(root))
        self.directory, self.aot = root, aot

    def get_default_build_data(self) -> dict[str, Any]:
        data = super().get_default_build_data()
        data["force_include"] = {str(self.directory / name): f"flashinfer/data/{name}" for name in SOURCES}
        if self.aot:
            artifacts = self.directory / "data" / "aot"
            manifests = checked_manifests(artifacts)
            for name in manifests:
                data["force_include"][str(artifacts / name)] = f"flashinfer/data/aot/{name}"
            data["pure_python"] = False
            data["tag"] = f"py3-none-{platform_tag(list(manifests.values()), platform.machine())}"
        return data


def checked_manifests(artifacts: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest of every module in a directory, after checking the library and the sources of each.

    Raises:
        RuntimeError: there is no module, or one is damaged or stale and would never be loaded.
    """
    root, manifests = artifacts.parent.parent, {}
    for path in sorted(artifacts.glob("[!.]*/manifest.json")):
        name, manifest = path.parent.name, json.loads(path.read_bytes())
        if file_digest(path.with_name(f"{name}.so")) != manifest["sha256"]:
            raise RuntimeError(f"{path.parent} is damaged: run scripts/build_aot.py again")
        changed = sorted(file for file, digest in manifest["files"].items() if file_digest(root / file) != digest)
        if changed:
            raise RuntimeError(f"{path.parent} is older than {', '.join(changed)}: run scripts/build_aot.py again")
        manifests[name] = manifest
    if not manifests:
        raise RuntimeError(f"aot=1 and there is no module in {artifacts}: run scripts/build_aot.py first")
    return manifests


def platform_tag(manifests: list[dict[str, Any]], machine: str) -> str:
    """Return the tag of the oldest glibc that all modules load on, by the symbol versions that they need."""
    floor = (2, 17)  # no older glibc has a libtorch
    for manifest in manifests:
        requires = {library: _version(number) for library, number in manifest["requires"].items()}
        floor = max(floor, requires.get("GLIBC", floor))
        for libstdcxx, glibc in GLIBC_OF_GLIBCXX.items():
            if requires.get("GLIBCXX", ()) >= libstdcxx:
                floor = max(floor, glibc)
    return f"manylinux_{floor[0]}_{floor[1]}_{machine}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
