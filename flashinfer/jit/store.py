"""Artifacts: finding one that may be loaded, and publishing one so that nobody ever sees half of it.

An artifact is a directory with ``<name>.so`` and ``manifest.json``. AOT directories hold ``<aot>/<name>/``, the
workspace ``<root>/artifacts/<name>/<key>/<build key>/``. The digest in the manifest is checked before a load.

Two rules differ by place. An AOT directory is the word of whoever shipped it: any artifact with the spec's key
that runs here is taken, whatever compiler made it. The workspace is this machine's own: where there is a
toolchain, an artifact must come from exactly this target and these versions; where there is none, any that runs.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import env
from ..errors import ToolchainError
from .closure import closure
from .spec import FORMAT, JitSpec, digest
from .target import Target, wanted_target, why_not_runnable
from .toolchain import Identity, Toolchain, toolchain_identity
from .workspace import roots

MANIFEST = "manifest.json"
Needs = Mapping[str, Iterable[str]]


@dataclass(frozen=True)
class Artifact:
    """A published module: where it is, and what its manifest says."""

    name: str
    path: Path
    manifest: dict[str, Any] = field(repr=False, compare=False)

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(self.manifest["archs"])


@dataclass(frozen=True)
class Lookup:
    """The artifact found, or none; and for every candidate passed over, why."""

    artifact: Artifact | None
    reasons: tuple[str, ...]

    @property
    def reason(self) -> str:
        return "; ".join(self.reasons) or "no artifact of that name exists"


def build_key(spec_key: str, target: Target, identity: Identity) -> str:
    """The full identity of a build: what the spec says, what for, and by which versions of the tools."""
    return digest([spec_key, target.archs, identity])


def workspace_directory(root: Path, spec: JitSpec, spec_key: str) -> Path:
    return root / "artifacts" / spec.name / spec_key[:32]


def find(spec: JitSpec, needs: Needs | None = None) -> Lookup:
    """The artifact to load for ``spec``: AOT directories first, then the workspace.

    ``needs`` are the values that the caller will use of each axis of the spec's coverage; an AOT artifact built
    for fewer values serves if it has those. Nothing is written and no lock is taken.
    """
    key = spec.key
    reasons: list[str] = []
    for directory in env.aot_dirs():
        found = read(directory / spec.name, spec.name)
        if isinstance(found, Artifact):
            refusal = _key_differs(found, spec, key, needs) or _unusable(found, spec.backend, exact=None)
            if refusal is None:
                return Lookup(found, tuple(reasons))
            found = f"{found.directory}: {refusal}"
        if found:
            reasons.append(found)
    for candidate in _in_workspace(spec, key):
        refusal = _unusable(candidate, spec.backend, exact=_exact_build_key(spec.backend, key))
        if refusal is None:
            return Lookup(candidate, tuple(reasons))
        reasons.append(f"{candidate.directory}: {refusal}")
    return Lookup(None, tuple(reasons))


def _in_workspace(spec: JitSpec, key: str) -> Iterator[Artifact]:
    for root in roots():
        try:
            names = sorted(os.listdir(workspace_directory(root, spec, key)))
        except OSError:
            continue
        for name in names:
            found = read(workspace_directory(root, spec, key) / name, spec.name)
            if isinstance(found, Artifact) and found.manifest["key"] == key:
                yield found


def _exact_build_key(backend: str, key: str) -> str | None:
    """The build key that this machine would give, or ``None`` if it cannot build at all."""
    try:
        return build_key(key, wanted_target(backend), toolchain_identity(backend))
    except ToolchainError:
        return None


def read(directory: Path, name: str) -> Artifact | str | None:
    """The artifact in a directory; why it is none; or ``None`` where there is nothing at all."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        size = os.stat(directory / f"{name}.so").st_size
    except FileNotFoundError:
        return None if not directory.exists() else f"{directory}: incomplete"
    except (OSError, ValueError) as err:
        return f"{directory}: unreadable ({err})"
    wanted = {"format": int, "name": str, "key": str, "build_key": str, "sha256": str, "size": int, "archs": list,
              "coverage": dict, "requires": dict, "toolchain": dict, "files": dict}  # fmt: skip
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(k), t) for k, t in wanted.items()):
        return f"{directory}: the manifest lacks fields"
    if manifest["format"] != FORMAT or manifest["name"] != name:
        return f"{directory}: the manifest is for {manifest['name']!r}, format {manifest['format']}"
    if manifest["size"] != size:
        return f"{directory}: {name}.so has {size} bytes, its manifest says {manifest['size']}"
    return Artifact(name, directory / f"{name}.so", manifest)


def _key_differs(found: Artifact, spec: JitSpec, key: str, needs: Needs | None) -> str | None:
    if found.manifest["key"] == key:
        return None
    # The same spec, built for another set of values? Then its key is that of this spec with that set.
    has = found.manifest["coverage"]
    wanted = {axis: set(values) for axis, values in (needs or dict(spec.coverage)).items()}
    if any(not values <= set(has.get(axis, ())) for axis, values in wanted.items()):
        lacking = ", ".join(
            f"{axis} {' '.join(sorted(values - set(has.get(axis, ()))))}" for axis, values in wanted.items()
        )
        return f"built without {lacking}"
    try:
        if has.keys() == dict(spec.coverage).keys() and spec.covering(has).key == found.manifest["key"]:
            return None
    except (TypeError, ValueError):
        pass
    return "built from other sources, flags or configuration"


def _unusable(found: Artifact, backend: str, exact: str | None) -> str | None:
    """Why an artifact with the right key cannot be used here, or ``None``."""
    manifest = found.manifest
    if exact is not None and manifest["build_key"] != exact:
        return "built for another target or by other tools"
    reason = why_not_runnable(backend, found.archs) or _runtime_too_old(manifest["requires"])
    if reason is None and (wanted := _asked_archs(backend)) and not set(wanted) <= set(found.archs):
        reason = f"built for {' '.join(found.archs)}, asked for {' '.join(wanted)}"
    if reason is None and file_digest(found.path) != manifest["sha256"]:
        reason = f"{found.path.name} is damaged: its digest is not the manifest's"
    return reason


def _asked_archs(backend: str) -> tuple[str, ...]:
    try:
        target = wanted_target(backend)
    except ToolchainError:
        return ()
    return target.archs if target.explicit else ()


def differences(found: Artifact, spec: JitSpec) -> list[str]:
    """What an artifact was built from and what ``spec`` says now, field by field where they differ."""
    was, now = found.manifest, spec.fields()
    files = sorted(name for name in {*was["files"], *now["files"]} if was["files"].get(name) != now["files"].get(name))
    fields = [
        f"{name}: {was.get(name)} -> {value}"
        for name, value in now.items()
        if name != "files" and was.get(name) != value
    ]
    return fields + [f"changed: {', '.join(files)}"] * bool(files)


def _runtime_too_old(requires: Mapping[str, str]) -> str | None:
    library, here = platform.libc_ver()
    wanted = requires.get("GLIBC", "0")
    if library == "glibc" and _version(here) < _version(wanted):
        return f"needs glibc {wanted}, this machine has {here}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def file_digest(path: Path) -> str:
    """SHA-256 of a file; empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def covered_files(spec: JitSpec) -> Iterator[str]:
    """The files whose contents the key of ``spec`` covers."""
    yield from closure(spec.roots(), spec.include_dirs)


def elf_requirements(path: Path) -> dict[str, str]:
    """The newest symbol version that a library needs of each of its libraries: ``{"GLIBC": "2.34", ...}``."""
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerNeedSection

    newest: dict[str, str] = {}
    with path.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, versions in section.iter_versions():
                    for version in versions:
                        library, _, number = version.name.partition("_")
                        if number[:1].isdigit() and _version(number) > _version(newest.get(library, "0")):
                            newest[library] = number
    return newest


def make_manifest(
    spec: JitSpec, key: str, target: Target, toolchain: Toolchain, so: Path, when: float, seconds: float
) -> dict[str, Any]:
    """What an artifact says of itself. ``built`` is a time, ``seconds`` what compiling took."""
    return {
        **spec.fields(),
        "format": FORMAT,
        "name": spec.name,
        "key": key,
        "build_key": build_key(key, target, toolchain.identity),
        "archs": list(target.archs),
        "toolchain": toolchain.identity,
        "requires": elf_requirements(so),
        "sha256": file_digest(so),
        "size": so.stat().st_size,
        "built": round(when),
        "seconds": round(seconds, 3),
    }


def publish(so: Path, manifest: Mapping[str, Any], destination: Path) -> Artifact:
    """Make a library and its manifest an artifact at ``destination``, whole or not at all.

    Private directory -> fsync -> rename. Where an artifact stands already, the two directories are exchanged in
    one step and the old one removed; processes that have it mapped keep it.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    name = manifest["name"]
    private = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        shutil.copyfile(so, private / f"{name}.so")
        (private / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path in (private / f"{name}.so", private / MANIFEST):
            path.chmod(0o644)
            _sync(path)
        private.chmod(0o755)
        _sync(private)
        _replace_directory(private, destination)
        _sync(destination.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return Artifact(name, destination / f"{name}.so", dict(manifest))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_directory(new: Path, place: Path) -> None:
    for _ in range(100):
        try:
            os.rename(new, place)  # also replaces an empty directory
            return
        except OSError:
            if not place.is_dir():
                raise
        if _exchange(new, place):
            return  # ``new`` now holds the old artifact; the caller removes it
        # A file system without an exchange: a loader that looks right now sees a miss, never a mixture.
        retired = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.old."))
        with suppress(FileNotFoundError):  # somebody else retired it
            os.rename(place, retired)
        shutil.rmtree(retired, ignore_errors=True)
    raise OSError(f"{place}: replaced by other processes again and again")


def _exchange(first: Path, second: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0)
