"""What the compilers make of the delta rule's kernels over chunks: no spills, and each product on tensor cores once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import compiled_for, sass_or_skip

# Products of tiles of 16 x 8 by 16: of a state of 16 columns by 128 keys, which are all that a warp has, and 64 tokens, and of a matrix on and below
# the diagonal. Of warpgroups: of keys, of tokens.
STATE, LOWER, KEYS, TOKENS = 64, 20, 8, 4
PREPARED = 128  # tiles of products of a chunk's rows with each other, where blocks of the same kernel make its terms
# The kernels of each source that walk over the chunks, and their products: of tiles where there are no warpgroups, of
# warpgroups, and of tiles beside these.
WALKS = {
    "chunk.cu": {
        "chain": (3 * STATE + 2 * LOWER, 0, 0),
        "split": (3 * STATE + 2 * LOWER, 0, 0),
        "split_groups": (0, 2 * KEYS + 3 * TOKENS, PREPARED),
    },
    "chunk_channels.cu": {
        "chain": (3 * STATE + 2 * LOWER, 0, 0),
        "split_groups": (0, 2 * KEYS + 3 * TOKENS, 0),
    },
    "chunk_wide.cu": {"chain": (3 * STATE + 2 * LOWER, 2 * KEYS + 3 * TOKENS, 0)},
    "chunk_wide_backward.cu": {"walks": (5 * STATE + 3 * LOWER, 2 * KEYS + 6 * TOKENS, 0)},
    "chunk_channels_backward.cu": {"walks": (5 * STATE + 3 * LOWER, 2 * KEYS + 6 * TOKENS, 0)},
    "chunk_backward.cu": {
        "walks": (5 * STATE + 3 * LOWER, 2 * KEYS + 6 * TOKENS, 0),
        "split_walks": (5 * STATE + 3 * LOWER, 0, 0),
    },
}
# How many shapes of blocks a kernel has on warps and on warpgroups. Narrow blocks are for both architectures, but those
# of a source that has warpgroups for every call.
SHAPES = {
    "80": {"chain": (3, 0), "split": (1, 0), "split_groups": (0, 0), "walks": (3, 0), "split_walks": (1, 0)},
    "90a": {"chain": (1, 0), "split": (1, 0), "split_groups": (0, 1), "walks": (1, 2), "split_walks": (1, 0)},
}
SHAPES_OF = {
    ("chunk_channels.cu", "90a"): {"chain": (0, 0)},
    ("chunk_channels_backward.cu", "90a"): {"walks": (0, 2)},
    ("chunk_wide_backward.cu", "80"): {"walks": (1, 0)},
    ("chunk_wide_backward.cu", "90a"): {"walks": (0, 1)},
    ("chunk_wide.cu", "80"): {"chain": (1, 0)},
    ("chunk_wide.cu", "90a"): {"chain": (0, 1)},
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("source", WALKS)
@pytest.mark.parametrize("arch", SHAPES)
def test_spills_and_products(source: str, arch: str, tmp_path: Path) -> None:
    place, said = compiled_for(arch, Path(__file__).parent / source, tmp_path)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0", "0")}, said
    assert "C75" not in said, said  # warpgroups' products wait for each other where the compiler says so
    sass = sass_or_skip(place)
    functions = dict(re.findall(r"Function : (\w*delta_\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    for kernel, (tiles, groups, beside) in WALKS[source].items():
        bodies = [text for name, text in functions.items() if f"delta_{kernel}_kernel" in name and "MMA" in text]
        by_tiles = [body for body in bodies if "HGMMA" not in body]
        shapes = SHAPES[arch] | SHAPES_OF.get((source, arch), {})
        assert (len(by_tiles), len(bodies) - len(by_tiles)) == shapes[kernel]
        for body in bodies:
            products = (len(re.findall(r"HMMA\.16816", body)), len(re.findall(r"HGMMA\.64x", body)))
            assert products == ((tiles, 0) if body in by_tiles else (beside, groups))
            assert body.count("LDGSTS") > 0
            assert not re.search(r"\b(STL|LDL)\b", body)
