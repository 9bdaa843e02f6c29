"""Machine code of the chunk kernels: no spills, and each product on tensor cores once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import compiled_for, sass_or_skip

# mma.sync tiles (16 x 8 by 16) of a product of a 16-column state strip with 64 tokens and 128 keys (STATE), and with
# a lower triangular matrix (LOWER). wgmma instructions of a product over keys (KEYS) or over tokens (TOKENS).
STATE, LOWER, KEYS, TOKENS = 64, 20, 8, 4
PREPARED = 128  # mma.sync tiles of the terms of a chunk, for kernels that also prepare terms
# Products of each scan kernel by source: mma.sync tiles without warpgroups, wgmma instructions, mma.sync next to wgmma.
SCANS = {
    "chunk.cu": {
        "forward": (3 * STATE + 2 * LOWER, 0, 0),
        "split": (3 * STATE + 2 * LOWER, 0, 0),
        "split_warpgroups": (0, 2 * KEYS + 3 * TOKENS, PREPARED),
    },
    "chunk_channels.cu": {
        "forward": (3 * STATE + 2 * LOWER, 0, 0),
        "split_warpgroups": (0, 2 * KEYS + 3 * TOKENS, 0),
    },
    "chunk_wide.cu": {"forward": (3 * STATE + 2 * LOWER, 2 * KEYS + 3 * TOKENS, 0)},
    "chunk_wide_backward.cu": {"backward_scans": (5 * STATE + 3 * LOWER, 2 * KEYS + 6 * TOKENS, 0)},
    "chunk_channels_backward.cu": {"backward_scans": (5 * STATE + 3 * LOWER, 2 * KEYS + 6 * TOKENS, 0)},
    "chunk_backward.cu": {
        "backward_scans": (5 * STATE + 3 * LOWER, 2 * KEYS + 6 * TOKENS, 0),
        "split_backward_scans": (5 * STATE + 3 * LOWER, 0, 0),
    },
}
# Number of shapes of each kernel on warps and on warpgroups. Both architectures have narrow CTAs, except in sources
# with warpgroups for every call.
SHAPES = {
    "80": {
        "forward": (3, 0),
        "split": (1, 0),
        "split_warpgroups": (0, 0),
        "backward_scans": (3, 0),
        "split_backward_scans": (1, 0),
    },
    "90a": {
        "forward": (1, 0),
        "split": (1, 0),
        "split_warpgroups": (0, 1),
        "backward_scans": (1, 2),
        "split_backward_scans": (1, 0),
    },
}
SHAPES_OF = {
    ("chunk_channels.cu", "90a"): {"forward": (0, 0)},
    ("chunk_channels_backward.cu", "90a"): {"backward_scans": (0, 2)},
    ("chunk_wide_backward.cu", "80"): {"backward_scans": (1, 0)},
    ("chunk_wide_backward.cu", "90a"): {"backward_scans": (0, 1)},
    ("chunk_wide.cu", "80"): {"forward": (1, 0)},
    ("chunk_wide.cu", "90a"): {"forward": (0, 1)},
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SCANS)
@pytest.mark.parametrize("arch", SHAPES)
def test_spills_and_products(source: str, arch: str, tmp_path: Path) -> None:
    library, said = compiled_for(arch, Path(__file__).parent / source, tmp_path)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0", "0")}, said
    assert "C75" not in said, said  # the compiler's warning that it serialises wgmma
    sass = sass_or_skip(library)
    functions = dict(re.findall(r"Function : (\w*delta_\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    for kernel, (tiles, wgmma, tiles_with_wgmma) in SCANS[source].items():
        bodies = [text for name, text in functions.items() if f"delta_{kernel}_kernel" in name and "MMA" in text]
        by_tiles = [body for body in bodies if "HGMMA" not in body]
        shapes = SHAPES[arch] | SHAPES_OF.get((source, arch), {})
        assert (len(by_tiles), len(bodies) - len(by_tiles)) == shapes[kernel]
        for body in bodies:
            products = (len(re.findall(r"HMMA\.16816", body)), len(re.findall(r"HGMMA\.64x", body)))
            assert products == ((tiles, 0) if body in by_tiles else (tiles_with_wgmma, wgmma))
            assert body.count("LDGSTS") > 0
            assert not re.search(r"\b(STL|LDL)\b", body)
