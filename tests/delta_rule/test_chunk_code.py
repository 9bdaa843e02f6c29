"""What the compilers make of the delta rule's kernels over chunks: no spills, and each product on tensor cores once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import compiled_for, sass_or_skip

# Of tiles of 16 x 8 by 16: a state of 16 columns by 128 keys times 64 tokens, and a matrix on and below the diagonal.
STATE, LOWER = 64, 20
# The kernels of each source that walk over the chunks, and their products: by tiles, and by warpgroups.
WALKS = {
    "chunk.cu": {"chain": (3 * STATE + 2 * LOWER, 8 + 8 + 4 + 4 + 4)},
    "chunk_backward.cu": {"replay": (2 * STATE + LOWER, 8 + 4 + 4), "reverse": (3 * STATE + 2 * LOWER, 8 + 4 * 4)},
}


@pytest.mark.parametrize("source", WALKS)
@pytest.mark.parametrize("arch", ["80", "90a"])
def test_spills_and_products(source: str, arch: str, tmp_path: Path) -> None:
    place, said = compiled_for(arch, Path(__file__).parent / source, tmp_path)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0", "0")}, said
    assert "C75" not in said, said  # warpgroups' products wait for each other where the compiler says so
    sass = sass_or_skip(place)
    functions = dict(re.findall(r"Function : (\w*delta_\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    for kernel, (tiles, groups) in WALKS[source].items():
        bodies = [text for name, text in functions.items() if f"delta_{kernel}_kernel" in name and "MMA" in text]
        assert len(bodies) == (2 if arch == "90a" else 3)  # shapes of blocks
        for body in bodies:
            found = body.count("HGMMA.64x") if arch == "90a" else body.count("HMMA.16816")
            assert found == (groups if arch == "90a" else tiles) and body.count("LDGSTS") > 0
            assert not re.search(r"\b(STL|LDL)\b", body)
