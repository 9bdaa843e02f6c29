"""One object of a store: an artifact, and a signature over what it is.

    magic, public key of the signer, signature, size of the manifest, size of the library; manifest; library

The layout is fixed: no name, no path and no size in it is believed. Signed are the digests of both files, the module's
name, its key and its build's key, so an object that was moved, or that is an old one of another key, is refused.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from ...errors import ArtifactError
from ..artifact import MANIFEST, Artifact, build_key, read, sealed, verified
from ..machine import trust
from ..machine.target import Target
from ..machine.workspace import scratch
from ..publish import publish
from .signing import Signer, is_signature, shown

MAGIC = b"flashinfer object 1\n"
_HEAD = struct.Struct(f">{len(MAGIC)}s32s64sQQ")


class Wanted(NamedTuple):
    """What is asked for: a module's name, its key, and the key of its build."""

    name: str
    key: str
    build_key: str

    @property
    def place(self) -> str:
        """The object's name in a store."""
        return f"{self.name}/{self.key}/{self.build_key}"


def pointer(name: str, key: str, archs: Collection[str]) -> str:
    """Where a machine without tools reads which build there is for these archs."""
    return f"{name}/{key}/default-{'_'.join(archs).replace('+', '-')}"


def wanted_of(found: Artifact) -> Wanted:
    return Wanted(found.name, found.manifest["key"], found.manifest["build_key"])


def pack(found: Artifact, signer: Signer | None) -> bytes:
    """The object of a verified artifact.

    Raises:
        ArtifactError: it is damaged.
    """
    with verified(found) as descriptor, open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        library = file.read()
    manifest = json.dumps(found.manifest, indent=1, sort_keys=True).encode()
    public, signature = bytes(32), bytes(64)
    if signer is not None:
        public, signature = signer(_signed(wanted_of(found), manifest, library))
    return _HEAD.pack(MAGIC, public, signature, len(manifest), len(library)) + manifest + library


def _signed(wanted: Wanted, manifest: bytes, library: bytes) -> bytes:
    digests = [hashlib.sha256(data).hexdigest() for data in (manifest, library)]
    return MAGIC + json.dumps([*wanted, *digests]).encode()


def unpack(data: bytes, wanted: Wanted, trusted: Collection[bytes] | None) -> tuple[bytes, bytes]:
    """Manifest and library of an object. ``trusted``: public keys; ``None`` asks for no signature.

    Raises:
        ArtifactError: it is not whole, not what was asked for, or not signed by one of them.
    """
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise ArtifactError(f"is no object ({len(data)} bytes)")
    _, public, signature, first, second = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + first + second:
        raise ArtifactError(f"has {len(data)} bytes, wanted {_HEAD.size + first + second}")
    manifest, library = data[_HEAD.size : _HEAD.size + first], data[_HEAD.size + first :]
    if trusted is not None:
        if not any(signature):
            raise ArtifactError("is not signed")
        if public not in trusted:
            raise ArtifactError(f"is signed by {shown(public)}, a key that FLASHINFER_STORE_KEYS does not have")
        if not is_signature(public, signature, _signed(wanted, manifest, library)):
            raise ArtifactError("is spoiled, or another module's: its signature is not of this")
    try:
        said = json.loads(manifest)
        made = build_key(said["key"], Target("", tuple(said["archs"]), False), said["toolchain"])
        if said != sealed(said) or hashlib.sha256(library).hexdigest() != said["sha256"]:
            raise ArtifactError("is damaged: a digest is not the manifest's")
        if tuple(wanted) != (said["name"], said["key"], said["build_key"]) or made != wanted.build_key:
            raise ArtifactError("is another module's, or of another build")
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as err:
        raise ArtifactError(f"has a manifest that cannot be read ({type(err).__name__})") from None
    return manifest, library


def install(
    data: bytes,
    wanted: Wanted,
    destination: Path,
    trusted: Collection[bytes] | None,
    refusal: Callable[[Artifact], str | None],
) -> Artifact:
    """Publish an object as any artifact is, once it is verified. ``refusal``: why this machine cannot use it.

    Raises:
        ArtifactError: why it is refused. OSError: the destination cannot be written.
    """
    manifest, library = unpack(data, wanted, trusted)
    trust.make_directories(destination.parent)
    # Looks like a publication that is under way, which loaders pass over and gc removes.
    with scratch(destination.parent, f".{destination.name}.") as folder:
        place = folder / wanted.name
        trust.make_directories(place)
        for name, content in ((MANIFEST, manifest), (f"{wanted.name}.so", library)):
            (place / name).write_bytes(content)
            (place / name).chmod(0o600)
        found = read(place, wanted.name)
        if not isinstance(found, Artifact):
            raise ArtifactError(f"is no artifact: {found}".replace(f"{place}: ", ""))
        if (reason := refusal(found)) is not None:
            raise ArtifactError(f"is not for this machine: {reason}")
        return publish(found.path, found.manifest, destination)
