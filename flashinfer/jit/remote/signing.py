"""Ed25519 signatures by ``cryptography``: a private key's file, and a trusted file of public keys."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ... import env
from ...errors import DependencyError, EnvironmentValueError
from ..machine import trust

Signer = Callable[[bytes], tuple[bytes, bytes]]  # message -> public key, signature
_LINE = re.compile(r"ed25519:([0-9a-f]{64})(\s.*)?")


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise DependencyError("cryptography", "signed stores need it", "store") from None
    return ed25519


def key_line(public: bytes) -> str:
    """Format a public key as a line of ``FLASHINFER_STORE_KEYS``."""
    return f"ed25519:{public.hex()}"


def keygen(path: Path) -> str:
    """Write a new private key and return the line of its public key. No file is ever replaced.

    Raises:
        OSError: the file exists already, or cannot be written.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = _ed25519().Ed25519PrivateKey.generate()
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
    return key_line(key.public_key().public_bytes_raw())


def signer() -> Signer:
    """Return a function that signs with ``FLASHINFER_STORE_SIGNING_KEY``.

    Raises:
        EnvironmentValueError: there is no such key, or other users can read it.
    """
    ed25519, path = _ed25519(), env.STORE_SIGNING_KEY.get()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    def refuse(wanted: str) -> EnvironmentValueError:
        return EnvironmentValueError("FLASHINFER_STORE_SIGNING_KEY", str(path or ""), wanted)

    if path is None:
        raise refuse("a file that `flashinfer store keygen FILE` made: written modules are signed")
    try:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            raise refuse("a file that no other user can read (chmod 600 would do)")
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as err:
        if isinstance(err, EnvironmentValueError):
            raise
        raise refuse(f"a private key of Ed25519 in PEM ({err})") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise refuse("a private key of Ed25519 in PEM")
    public: bytes = key.public_key().public_bytes_raw()
    return lambda message: (public, key.sign(message))


def trusted_keys() -> frozenset[bytes]:
    """Return the public keys of ``FLASHINFER_STORE_KEYS``.

    Raises:
        EnvironmentValueError: there is no such file, a line of it is invalid, or other users can write it.
    """
    _ed25519()
    path, keys = env.STORE_KEYS.get(), set[bytes]()

    def refuse(wanted: str) -> EnvironmentValueError:
        return EnvironmentValueError("FLASHINFER_STORE_KEYS", str(path or ""), wanted)

    if path is None:
        raise refuse("a file of public keys, for a store without unsigned+ before its URL")
    try:
        if (refusal := trust.refusal(path)) is not None:
            raise refuse(f"a file that only its owner can write: {refusal}")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise refuse(f"a file of public keys ({err})") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            if (match := _LINE.fullmatch(line.strip())) is None:
                raise refuse(f"a line of ed25519:<64 hexadecimal digits> for each key (line {number} is not)")
            keys.add(bytes.fromhex(match[1]))
    if not keys:
        raise refuse("at least one public key")
    return frozenset(keys)


def is_signature(public: bytes, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    with suppress(InvalidSignature):
        _ed25519().Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
        return True
    return False
