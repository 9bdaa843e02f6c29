"""One artifact: what its manifest says, whether its bytes may be used, and publishing one whole.

It is a directory with ``<name>.so`` and ``manifest.json``, which holds the digests of the library and of itself:
SHA-256, for which CPUs have instructions (1.3 MB in 0.75 ms, twice as fast as Python's others) and ``sha256sum``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArtifactError
from .machine import trust
from .machine.target import Target
from .machine.toolchain import Identity, Toolchain
from .spec import FORMAT, Spec, digest

MANIFEST = "manifest.json"
_FIELDS = {"format": int, "name": str, "key": str, "build_key": str, "sha256": str, "size": int, "archs": list, "seal": str,
           "coverage": dict, "requires": dict, "toolchain": dict, "files": dict, "torch_abi": list}  # fmt: skip


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


def build_key(spec_key: str, target: Target, identity: Identity) -> str:
    """The full identity of a build: what the spec says, what for, and by which versions of the tools."""
    return digest([spec_key, target.archs, identity])


def read(directory: Path, name: str) -> Artifact | str | None:
    """The artifact in a directory, by its manifest alone; why it is none; or ``None`` where there is nothing at all."""
    try:
        if (refusal := trust.refusal(directory)) is not None:
            return refusal
        with open(directory / MANIFEST, "rb") as file:
            if (refusal := trust.refusal(file.name, os.fstat(file.fileno()))) is not None:
                return refusal
            manifest = json.loads(file.read())
        size = os.stat(directory / f"{name}.so").st_size
    except FileNotFoundError:
        return None if not directory.exists() else f"{directory}: incomplete"
    except (OSError, ValueError) as err:
        return f"{directory}: unreadable ({err})"
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(k), t) for k, t in _FIELDS.items()):
        return f"{directory}: the manifest lacks fields"
    if manifest["format"] != FORMAT or manifest["name"] != name:
        return f"{directory}: the manifest is for {manifest['name']!r}, format {manifest['format']}"
    if manifest != sealed(manifest):
        return f"{directory}: the manifest is damaged: its digest is not its own"
    if manifest["size"] != size:
        return f"{directory}: {name}.so has {size} bytes, its manifest says {manifest['size']}"
    return Artifact(name, directory / f"{name}.so", manifest)


@contextmanager
def verified(found: Artifact) -> Iterator[int]:
    """A descriptor of the library of ``found``, whose bytes are the manifest's and which nobody else can write.

    Publishing replaces files and changes none: bytes stay what they are for whoever has the file open or mapped.

    Raises:
        ArtifactError: why the library is not to be used.
    """
    try:
        handle = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        raise ArtifactError(f"{found.path}: {err.strerror}") from None
    try:
        status = os.fstat(handle)
        if (refusal := trust.refusal(found.path, status)) is not None:
            raise ArtifactError(refusal)
        if not stat.S_ISREG(status.st_mode) or _digest_of(handle) != found.manifest["sha256"]:
            raise ArtifactError(f"{found.path.name} is damaged: its digest is not the manifest's")
        yield handle
    finally:
        os.close(handle)


def _digest_of(handle: int) -> str:
    # Read, not mapped: a file that somebody truncates now would kill this process with a SIGBUS.
    result, buffer = hashlib.sha256(), bytearray(1 << 18)
    with open(handle, "rb", buffering=0, closefd=False) as file:
        while count := file.readinto(buffer):
            result.update(memoryview(buffer)[:count])
    return result.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return _digest_of(file.fileno())


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its own digest in it: one that was damaged or edited anywhere has another."""
    return {**manifest, "seal": digest({name: value for name, value in manifest.items() if name != "seal"})}


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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def make_manifest(
    spec: Spec, key: str, target: Target, toolchain: Toolchain, so: Path, seconds: float
) -> dict[str, Any]:
    """What an artifact that has just been built says of itself. ``seconds``: what compiling took."""
    return {
        **spec.fields(),
        "key": key,
        "build_key": build_key(key, target, toolchain.identity),
        "archs": list(target.archs),
        "toolchain": toolchain.identity,
        "requires": elf_requirements(so),
        "sha256": file_digest(so),
        "size": so.stat().st_size,
        "built": round(time.time()),
        "seconds": round(seconds, 3),
    }


def publish(so: Path, manifest: Mapping[str, Any], destination: Path) -> Artifact:
    """Make a library and its manifest an artifact at ``destination``, whole or not at all.

    Private directory -> fsync -> rename. One that stands there already is exchanged for it in one step, and stays
    for the processes that have it mapped.
    """
    trust.make_directories(destination.parent)
    name = manifest["name"]
    private = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        shutil.copyfile(so, private / f"{name}.so")
        manifest = sealed(manifest)
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
    return Artifact(name, destination / f"{name}.so", manifest)


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
