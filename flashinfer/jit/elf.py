"""Read the symbol versions that a shared library needs of others.

The tables are those of the System V ABI and of the Linux Standard Base (symbol versioning). A package that reads all of
ELF is not used here: importing one may import ``pdb``, which imports ``code`` and ``cmd``, names that programs have.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_VERNEED = 0x6FFFFFFE  # sh_type of .gnu.version_r


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def needed_versions(path: Path) -> list[str]:
    """Return names of versions such as ``GLIBC_2.34``, in the order of the file.

    Raises:
        ValueError: the file is no ELF file of 64 bits, or is cut short.
    """
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02" or data[5:6] not in (b"\x01", b"\x02"):
        raise ValueError(f"{path} is no ELF file of 64 bits")
    try:
        return list(_versions(data, "<" if data[5] == 1 else ">"))
    except struct.error:
        raise ValueError(f"{path} is cut short") from None


def _versions(data: bytes, order: str) -> Iterator[str]:
    (start,) = struct.unpack_from(f"{order}Q", data, 0x28)
    size, count = struct.unpack_from(f"{order}HH", data, 0x3A)
    sections = [_Section._make(struct.unpack_from(f"{order}IIQQQQIIQQ", data, start + size * n)) for n in range(count)]
    for section in (one for one in sections if one.type == _VERNEED):
        strings, library = sections[section.link].offset, section.offset
        for _ in range(section.info):
            _, versions, _, first, following = struct.unpack_from(f"{order}HHIII", data, library)
            version = library + first
            for _ in range(versions):
                _, _, _, name, next_version = struct.unpack_from(f"{order}IHHII", data, version)
                yield data[strings + name : data.index(b"\0", strings + name)].decode()
                version += next_version
            library += following
