"""What the compilers make of the delta rule's kernels over chunks: no spills, and each product on tensor cores once."""

from __future__ import annotations

import re
from pathlib import Path

from ..support.device_code import compiled_for_hopper, sass_or_skip

SHAPES = [(key_dim, warps) for key_dim in (64, 128) for warps in (2, 4, 8)]


def test_spills_and_instructions(tmp_path: Path) -> None:
    place, said = compiled_for_hopper(Path(__file__).parent / "chunk.cu", tmp_path)
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) == len(SHAPES) + 2 and set(spills) == {("0", "0", "0")}, said
    sass = sass_or_skip(place)
    functions = dict(re.findall(r"Function : (\w*delta_\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    for key_dim, warps in SHAPES:
        (body,) = (text for name, text in functions.items() if f"Li{key_dim}ELi{warps}E" in name)
        # S K and S Q, Z and P on and below the diagonal, K' u.
        assert body.count("HMMA.16816") == 3 * key_dim // 8 * 4 + 2 * 20
        assert body.count("MOVM.16.MT88") == 16 and body.count("LDGSTS") > 0
        assert not re.search(r"\b(STL|LDL)\b", body)
