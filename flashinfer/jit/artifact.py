"""One artifact: its manifest, the checks before its bytes are used, and its publication.

An artifact is a directory with ``<name>.so`` and ``manifest.json``, which holds the digests of the library
and of itself. The digest is SHA-256, because CPUs have instructions for it (1.3 MB in 0.75 ms, twice as fast
as Python's other hashes) and ``sha256sum`` checks it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from .. import env
from ..errors import ArtifactError
from .machine import trust
from .machine.target import Target
from .machine.toolchain import Identity
from .machine.workspace import make_private, name_in_errors
from .spec import FORMAT, digest

MANIFEST = "manifest.json"
_FIELDS: dict[str, type] = {
    **dict.fromkeys(("format", "size"), int),
    **dict.fromkeys(("name", "key", "build_key", "sha256", "seal"), str),
    **dict.fromkeys(("archs", "torch_abi"), list),
    **dict.fromkeys(("coverage", "requires", "toolchain", "files"), dict),
}


@dataclass(frozen=True)
class Artifact:
    """A published module: its path and its manifest."""

    name: str
    path: Path
    manifest: dict[str, Any] = field(repr=False, compare=False)

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def is_prebuilt(self) -> bool:
        """Return whether it is in an AOT directory."""
        return self.directory.parent in env.aot_dirs()

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(self.manifest["archs"])


def build_key(spec_key: str, target: Target, identity: Identity) -> str:
    """Return the full identity of a build: the spec's key, the target and the versions of the tools."""
    return digest([spec_key, target.archs, identity])


def read(directory: Path, name: str) -> Artifact | str | None:
    """Read the artifact of a directory. Return the reason if it is invalid, ``None`` if there is no manifest."""
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
        return f"{directory}: the manifest is damaged: its digest differs"
    if manifest["size"] != size:
        return f"{directory}: {name}.so has {size} bytes, its manifest says {manifest['size']}"
    return Artifact(name, directory / f"{name}.so", manifest)


@contextmanager
def verified(found: Artifact) -> Iterator[int]:
    """Yield a descriptor of a library that matches its manifest and that nobody else can write.

    Publishing replaces files and never changes them. The bytes stay the same for every process that has the
    file open or mapped.

    Raises:
        ArtifactError: the library must not be used. The text gives the reason.
    """
    try:
        file = open(found.path, "rb", 0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as err:
        raise ArtifactError(f"{found.path}: {err.strerror}") from None
    with file:
        status = os.fstat(file.fileno())
        if (refusal := trust.refusal(found.path, status)) is not None:
            raise ArtifactError(refusal)
        if not stat.S_ISREG(status.st_mode) or _digest_of(file) != found.manifest["sha256"]:
            raise ArtifactError(f"{found.path.name} is damaged: its digest differs from the manifest")
        yield file.fileno()


def _digest_of(file: FileIO) -> str:
    # Read, not mapped: a file that is truncated meanwhile would kill this process with a SIGBUS.
    result, buffer = hashlib.sha256(), bytearray(1 << 18)
    while count := file.readinto(buffer):
        result.update(memoryview(buffer)[:count])
    return result.hexdigest()


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with its own digest, which detects damage and edits anywhere in it."""
    return {**manifest, "seal": digest({name: value for name, value in manifest.items() if name != "seal"})}


def elf_requirements(path: Path) -> dict[str, str]:
    """Return the newest symbol version that a library needs from each other library: ``{"GLIBC": "2.34", ...}``."""
    needs = [(library, number) for library, _, number in (name.partition("_") for name in needed_versions(path))]
    # dict() keeps the last version of each library, which is the newest.
    return dict(sorted((need for need in needs if need[1][:1].isdigit()), key=lambda need: _version(need[1])))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def publish(so: Path, manifest: Mapping[str, Any], destination: Path) -> Artifact:
    """Publish a library and its manifest as an artifact at ``destination``, completely or not at all.

    The steps are: private directory, fsync, rename. An existing artifact is exchanged in one step, and
    processes that have mapped it keep it.

    Raises:
        OSError: the destination cannot be written. The error names the path.
    """
    with name_in_errors(destination):
        return _publish(so, manifest, destination)


def _publish(so: Path, manifest: Mapping[str, Any], destination: Path) -> Artifact:
    trust.make_directories(destination.parent)
    name = manifest["name"]
    private = make_private(destination.parent, f".{destination.name}.")
    try:
        shutil.copyfile(so, private / f"{name}.so")
        manifest = sealed(manifest)
        (private / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path, mode in ((private / f"{name}.so", 0o644), (private / MANIFEST, 0o644), (private, 0o755)):
            path.chmod(mode)
            sync_to_disk(path)
        _replace_directory(private, destination)
        sync_to_disk(destination.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return Artifact(name, destination / f"{name}.so", manifest)


def sync_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_directory(new: Path, destination: Path) -> None:
    for _ in range(100):
        try:
            os.rename(new, destination)  # also replaces an empty directory
            return
        except OSError:
            if not destination.is_dir():
                raise
        if _exchange(new, destination):
            return  # ``new`` now holds the old artifact, which the caller removes
        # This file system cannot exchange: a load sees a miss for a moment, but never a mixture.
        retired = make_private(destination.parent, f".{destination.name}.old.")
        with suppress(FileNotFoundError):  # another process retired it
            os.rename(destination, retired)
        shutil.rmtree(retired, ignore_errors=True)
    raise OSError(f"{destination}: replaced by other processes again and again")


def _exchange(first: Path, second: Path) -> bool:
    at_cwd, exchange = -100, 2
    status = ctypes.CDLL(None).renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange)
    return bool(status == 0)


# An ELF package may import ``pdb``, which imports ``code`` and ``cmd``. A user's modules may have these names, so this
# file reads ELF itself. The tables are those of the System V ABI and of the Linux Standard Base.
_VERNEED = 0x6FFFFFFE  # sh_type of .gnu.version_r


def needed_versions(path: Path) -> list[str]:
    """Return names of versions such as ``GLIBC_2.34``, in the order of the file.

    Raises:
        ValueError: the file is not a 64-bit ELF file, or is truncated.
    """
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02" or data[5:6] not in (b"\x01", b"\x02"):
        raise ValueError(f"{path} is not a 64-bit ELF file")
    try:
        return list(_versions(data, "<" if data[5] == 1 else ">"))
    except struct.error:
        raise ValueError(f"{path} is truncated") from None


def _versions(data: bytes, order: str) -> Iterator[str]:
    (start,) = struct.unpack_from(f"{order}Q", data, 0x28)
    size, count = struct.unpack_from(f"{order}HH", data, 0x3A)
    # Fields of a section: name, type, flags, address, offset, size, link, info, alignment, size of an entry.
    sections = [struct.unpack_from(f"{order}IIQQQQIIQQ", data, start + size * n) for n in range(count)]
    for _, kind, _, _, library, _, link, libraries, _, _ in sections:
        if kind != _VERNEED:
            continue
        strings = sections[link][4]
        for _ in range(libraries):
            _, versions, _, first, following = struct.unpack_from(f"{order}HHIII", data, library)
            version = library + first
            for _ in range(versions):
                _, _, _, name, next_version = struct.unpack_from(f"{order}IHHII", data, version)
                yield data[strings + name : data.index(b"\0", strings + name)].decode()
                version += next_version
            library += following
