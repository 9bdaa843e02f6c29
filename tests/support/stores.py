"""Hosts that share a store, on this machine: the store, signing keys and a workspace per host."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer.jit.artifact import Artifact
from flashinfer.jit.remote import transfer

from .object_store import ObjectStore


class Host:
    """Moves the process to another host by a workspace of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def __call__(self, name: str, url: str, publish: bool = False) -> Path:
        place = self.folder / f"host-{name}"
        self.monkeypatch.setenv("FLASHINFER_WORKSPACE_DIR", str(place))
        self.monkeypatch.setenv("FLASHINFER_STORE", url)
        self.monkeypatch.setenv("FLASHINFER_STORE_PUBLISH", str(int(publish)))
        self.monkeypatch.setattr(transfer, "_stores", {})
        return place


def is_object(path: str) -> bool:
    return "/default-" not in path


def place_of(remote: ObjectStore) -> str:
    (path,) = filter(is_object, remote.objects)
    return path


def taken(*requests) -> list:
    """Return the artifacts of modules in the stores, with the modules' locks held."""
    return [found for _, found in transfer.fetch_all(requests) if isinstance(found, Artifact)]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
