"""What the compilers make of the delta rule's kernels over chunks: no spills, and each product on tensor cores once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import compiled_for_hopper, sass_or_skip

# Of tiles of 16 x 8 by 16: a state of 16 columns by 128 keys times 64 tokens, and a matrix on and below the diagonal.
STATE, LOWER = 64, 20
# The kernels of each source that walk over the chunks: how many shapes of blocks they have, and their products.
WALKS = {
    "chunk.cu": {"chain": (3, 3 * STATE + 2 * LOWER), "split": (1, 3 * STATE + 2 * LOWER)},
    "chunk_backward.cu": {"replay": (3, 2 * STATE + LOWER), "reverse": (3, 3 * STATE + 2 * LOWER)},
}


@pytest.mark.parametrize("source", WALKS)
def test_spills_and_products(source: str, tmp_path: Path) -> None:
    place, said = compiled_for_hopper(Path(__file__).parent / source, tmp_path)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and set(spills) == {("0", "0", "0")}, said
    sass = sass_or_skip(place)
    functions = dict(re.findall(r"Function : (\w*delta_\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    for kernel, (shapes, products) in WALKS[source].items():
        bodies = [text for name, text in functions.items() if f"delta_{kernel}_kernel" in name]
        assert len(bodies) == shapes
        for body in bodies:
            assert body.count("HMMA.16816") == products and body.count("LDGSTS") > 0
            assert not re.search(r"\b(STL|LDL)\b", body)
