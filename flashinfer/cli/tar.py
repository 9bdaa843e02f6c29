"""Archives of ``export`` and ``import``: a tar of an index and plain files, with the same bytes every time.

The first member, ``index.json``, names every other member with its size and SHA-256. They follow in the order
of their names, and nothing else is allowed. So no name, link, device, header or size of an archive is ever
trusted: only the files of the index are read, and the index is checked completely before the first file is
written.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ..errors import ArtifactError
from .usage import UsageError

INDEX, FORMAT = "index.json", 1
LARGEST_INDEX = 16 << 20
_BLOCK, _CHUNK = 512, 1 << 20
_MEMBER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.+-]{0,127})/(manifest\.json|library\.so)")
_KINDS = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"5": "a directory", b"6": "a pipe"}


@dataclass(frozen=True)
class File:
    """One file of an archive: its size and digest, and a stream of its bytes."""

    size: int
    sha256: str
    content: IO[bytes]

    @classmethod
    def of(cls, data: bytes) -> File:
        return cls(len(data), hashlib.sha256(data).hexdigest(), io.BytesIO(data))


def pack(archive: Path, files: Mapping[str, File]) -> None:
    """Write an archive, completely or not at all.

    ``files``: names such as ``norm_cpu/library.so`` -> contents.
    """
    entries = {name: {"size": file.size, "sha256": file.sha256} for name, file in files.items()}
    index = File.of(json.dumps({"format": FORMAT, "files": entries}, sort_keys=True).encode())
    private = archive.with_name(f".{archive.name}.{os.getpid()}")
    try:
        with (
            private.open("xb") as raw,
            _written(raw, archive.name) as out,
            tarfile.open(fileobj=out, mode="w|", format=tarfile.USTAR_FORMAT) as tar,
        ):
            for name, file in [(INDEX, index), *sorted(files.items())]:
                member = tarfile.TarInfo(name)  # of owner 0 and time 0 by default
                member.size, member.mode = file.size, 0o644
                tar.addfile(member, file.content)
        private.replace(archive)
    finally:
        private.unlink(missing_ok=True)


@contextmanager
def _written(raw: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    """Yield a stream whose data is written to ``raw``, compressed according to the suffix of ``name``."""
    if name.endswith((".gz", ".tgz")):
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
            yield cast(IO[bytes], packed)
    elif name.endswith(".zst"):
        with _zstd().ZstdFile(raw, "wb") as packed:
            yield packed
    elif name.endswith(".tar"):
        yield raw
    else:
        raise UsageError(f"archive: got {name!r}, wanted a name that ends in .tar, .tar.gz or .tar.zst")


def _zstd() -> Any:
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:
        raise UsageError("archive: .zst needs Python 3.14 or newer; .tar.gz and .tar need nothing") from None


def unpack(archive: Path, folder: Path) -> list[str]:
    """Read an archive into ``folder/<module>/manifest.json`` and ``<module>.so``. Return the modules' names.

    Raises:
        ArtifactError: it is not exactly what :func:`pack` writes. Files written so far are no artifact.
        OSError: it cannot be read, or ``folder`` cannot be written.
    """
    with archive.open("rb") as raw, _read(raw) as stream:
        source = Source(archive, stream)
        name, size = source.member()
        if name != INDEX or size > LARGEST_INDEX:
            raise ArtifactError(f"{archive}: begins with {name!r} of {size} bytes, wanted a small {INDEX}")
        index = _checked_index(archive, source.take(size, padded=True))
        if (total := sum(size for size, _ in index.values())) > (free := shutil.disk_usage(folder).free):
            raise ArtifactError(f"{archive}: holds {total} bytes, {folder} has {free} free")
        for wanted, (size, sha256) in sorted(index.items()):
            if (found := source.member()) != (wanted, size):
                raise ArtifactError(f"{archive}: got {found[0]!r} of {found[1]} bytes, wanted {wanted!r} of {size}")
            module, _, kind = wanted.partition("/")
            (folder / module).mkdir(mode=0o700, exist_ok=True)
            file = folder / module / (kind if kind != "library.so" else f"{module}.so")
            if source.copy(size, file) != sha256:
                raise ArtifactError(f"{archive}: {wanted!r} is damaged: its digest differs from the index")
        source.end()
    return sorted({name.partition("/")[0] for name in index})


@contextmanager
def _read(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=raw) as stream:
            yield cast(IO[bytes], stream)
    elif magic == b"\x28\xb5\x2f\xfd":
        with _zstd().ZstdFile(raw) as stream:
            yield stream
    else:
        yield raw


def _checked_index(archive: Path, data: bytes) -> dict[str, tuple[int, str]]:
    """Return member -> size and SHA-256. Every module must have both of its files."""
    try:
        index = json.loads(data)
        files = {str(name): (one["size"], one["sha256"]) for name, one in index["files"].items()}
        version = index["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(f"{archive}: {INDEX} is not an index of modules") from None
    if version != FORMAT:
        raise ArtifactError(f"{archive}: {INDEX} has format {version}, wanted {FORMAT}")
    for name, (size, sha256) in files.items():
        match = _MEMBER.fullmatch(name)
        if match is None:
            raise ArtifactError(f"{archive}: {INDEX} names {name!r}, wanted <module>/manifest.json or /library.so")
        if type(size) is not int or size < 0 or not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ArtifactError(f"{archive}: {INDEX}: {name!r}: got {size!r} bytes of SHA-256 {sha256!r}")
        if not {f"{match[1]}/manifest.json", f"{match[1]}/library.so"} <= files.keys():
            raise ArtifactError(f"{archive}: {INDEX}: {match[1]} has one file, wanted manifest.json and library.so")
    return files


class Source:
    """The blocks of a tar in order. No more bytes are read at once than were checked before."""

    def __init__(self, archive: Path, stream: IO[bytes]) -> None:
        self.archive, self.stream = archive, stream

    def take(self, size: int, padded: bool = False) -> bytes:
        """Return exactly ``size`` bytes. ``padded``: skip the rest of their last block too."""
        left, parts = size + (-size % _BLOCK if padded else 0), list[bytes]()
        while left:
            part = self.read_some(min(left, _CHUNK))
            if not part:
                raise ArtifactError(f"{self.archive}: ends too early")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)[:size]

    def read_some(self, most: int) -> bytes:
        """Return at most ``most`` bytes, none at the end."""
        try:
            return self.stream.read(most)
        except Exception as err:  # every compression has its own errors
            raise ArtifactError(f"{self.archive}: is damaged: {err}") from None

    def member(self) -> tuple[str, int]:
        """Return name and size of the next file.

        Raises:
            ArtifactError: the next member is not a plain file with a plain name and size.
        """
        block = self.take(_BLOCK)
        kind, size = block[156:157], block[124:136].strip(b" \0")
        name, prefix = (block[at:to].split(b"\0")[0].decode("ascii", "replace") for at, to in ((0, 100), (345, 500)))
        name = f"{prefix}/{name}" if prefix else name
        # Sum of the header's bytes, with its own field as spaces.
        if block[148:156] != b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * 32):
            raise ArtifactError(f"{self.archive}: is damaged or not an archive of modules")
        if kind != b"0" or block[257:263] != b"ustar\0":
            what = _KINDS.get(kind, f"a member of type {kind!r}")
            raise ArtifactError(f"{self.archive}: {name!r} is {what}, wanted plain files only")
        if not re.fullmatch(b"[0-7]{1,11}", size):
            raise ArtifactError(f"{self.archive}: {name!r}: got the size {size!r}, wanted an octal number")
        return name, int(size, 8)

    def copy(self, size: int, file: Path) -> str:
        """Write the contents of a file and return their digest."""
        digest, left = hashlib.sha256(), size
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as out:
            while left:
                part = self.take(min(left, _CHUNK))
                digest.update(part)
                out.write(part)
                left -= len(part)
        self.take(-size % _BLOCK)
        return digest.hexdigest()

    def end(self) -> None:
        """Check that only the zeros follow that fill a tar's last record."""
        rest = self.take(2 * _BLOCK)
        while len(rest) < 64 * _BLOCK and (part := self.read_some(64 * _BLOCK)):
            rest += part
        if len(rest) >= 64 * _BLOCK or any(rest):
            raise ArtifactError(f"{self.archive}: continues after its last file")
