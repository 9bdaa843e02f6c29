"""One artifact: its manifest, and the checks before its bytes are used.

An artifact is a directory with ``<name>.so`` and ``manifest.json``, which holds the digests of the library
and of itself. The digest is SHA-256, because CPUs have instructions for it (1.3 MB in 0.75 ms, twice as fast
as Python's other hashes) and ``sha256sum`` checks it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from .. import env
from ..errors import ArtifactError
from .machine import trust
from .machine.identity import Identity
from .machine.target import Target
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
    """Return a directory's artifact by its manifest, or why it is invalid, or ``None`` without one."""
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
    """Yield a descriptor of a library whose bytes match the manifest and which nobody else can write.

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
