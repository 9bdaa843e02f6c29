"""Objects of a store: an artifact with a signature.

    magic, public key of the signer, signature, size of the manifest, size of the library; manifest; library

The layout is fixed, and no name, path or size in it is trusted. The signature covers the digests of both
files, the module's name, its key and its build key. An object at another path or of another key is therefore
rejected.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from ...errors import ArtifactError
from ..artifact import MANIFEST, Artifact, build_key, publish, read, sealed, verified
from ..machine import trust
from ..machine.target import Target
from ..machine.workspace import scratch
from .signing import Signer, is_signature, key_line

MAGIC = b"flashinfer object 1\n"
_HEAD = struct.Struct(f">{len(MAGIC)}s32s64sQQ")


class ObjectId(NamedTuple):
    """Identity of an object: a module's name, its key and its build key."""

    name: str
    key: str
    build_key: str

    @property
    def path(self) -> str:
        """Return the object's path in a store."""
        return f"{self.name}/{self.key}/{self.build_key}"


def pointer(name: str, key: str, archs: Collection[str]) -> str:
    """Return the path of the file that tells a machine without tools which build to use for these archs."""
    return f"{name}/{key}/default-{'_'.join(archs).replace('+', '-')}"


def id_of(found: Artifact) -> ObjectId:
    return ObjectId(found.name, found.manifest["key"], found.manifest["build_key"])


def pack(found: Artifact, signer: Signer | None) -> bytes:
    """Return the object of a verified artifact.

    Raises:
        ArtifactError: the artifact is damaged.
    """
    with verified(found) as descriptor, open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        library = file.read()
    manifest = json.dumps(found.manifest, indent=1, sort_keys=True).encode()
    public, signature = bytes(32), bytes(64)
    if signer is not None:
        public, signature = signer(_signed_message(id_of(found), manifest, library))
    return _HEAD.pack(MAGIC, public, signature, len(manifest), len(library)) + manifest + library


def _signed_message(expected: ObjectId, manifest: bytes, library: bytes) -> bytes:
    digests = [hashlib.sha256(data).hexdigest() for data in (manifest, library)]
    return MAGIC + json.dumps([*expected, *digests]).encode()


def unpack(data: bytes, expected: ObjectId, trusted: Collection[bytes] | None) -> tuple[bytes, bytes]:
    """Return manifest and library of an object. ``trusted``: public keys, or ``None`` to skip signatures.

    Raises:
        ArtifactError: it is incomplete, another object, or not signed by a trusted key.
    """
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise ArtifactError(f"is not an object ({len(data)} bytes)")
    _, public, signature, first, second = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + first + second:
        raise ArtifactError(f"has {len(data)} bytes, wanted {_HEAD.size + first + second}")
    manifest, library = data[_HEAD.size : _HEAD.size + first], data[_HEAD.size + first :]
    if trusted is not None:
        if not any(signature):
            raise ArtifactError("is not signed")
        if public not in trusted:
            raise ArtifactError(f"is signed by {key_line(public)}, a key that FLASHINFER_STORE_KEYS does not have")
        if not is_signature(public, signature, _signed_message(expected, manifest, library)):
            raise ArtifactError("has a wrong signature: the object is damaged, or belongs to another module")
    try:
        claims = json.loads(manifest)
        claimed_build = build_key(claims["key"], Target("", tuple(claims["archs"]), False), claims["toolchain"])
        if claims != sealed(claims) or hashlib.sha256(library).hexdigest() != claims["sha256"]:
            raise ArtifactError("is damaged: a digest differs from the manifest")
        if (
            tuple(expected) != (claims["name"], claims["key"], claims["build_key"])
            or claimed_build != expected.build_key
        ):
            raise ArtifactError("belongs to another module or another build")
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as err:
        raise ArtifactError(f"has an invalid manifest ({type(err).__name__})") from None
    return manifest, library


def install(
    data: bytes,
    expected: ObjectId,
    destination: Path,
    trusted: Collection[bytes] | None,
    refusal: Callable[[Artifact], str | None],
) -> Artifact:
    """Verify an object and publish it like any artifact. ``refusal``: returns why this machine cannot use it.

    Raises:
        ArtifactError: the object is rejected. The text gives the reason.
        OSError: the destination cannot be written.
    """
    manifest, library = unpack(data, expected, trusted)
    trust.make_directories(destination.parent)
    # The directory looks like a publication in progress: loads skip it, and gc removes it.
    with scratch(destination.parent, f".{destination.name}.") as folder:
        directory = folder / expected.name
        trust.make_directories(directory)
        for name, content in ((MANIFEST, manifest), (f"{expected.name}.so", library)):
            (directory / name).write_bytes(content)
            (directory / name).chmod(0o600)
        found = read(directory, expected.name)
        if not isinstance(found, Artifact):
            raise ArtifactError(f"is not an artifact: {found}".replace(f"{directory}: ", ""))
        if (reason := refusal(found)) is not None:
            raise ArtifactError(f"is not for this machine: {reason}")
        return publish(found.path, found.manifest, destination)
