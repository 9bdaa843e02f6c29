"""Compiled code of the Hopper decode kernels: no spills, all partial states of a merge loaded at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import assert_clean, compiled_for, sass_or_skip

HERE = Path(__file__).parent
INSTANCES = 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the object file of decode.cu and ptxas' output."""
    return compiled_for("90a", HERE / "decode.cu", tmp_path_factory.mktemp("decode"))


def test_ptxas_spills_nothing(compiled: tuple[Path, str]) -> None:
    assert_clean(compiled[1], "16attention_kernel", INSTANCES)


def test_partial_states_are_loaded_at_once(compiled: tuple[Path, str]) -> None:
    sass = sass_or_skip(compiled[0])
    functions = dict(re.findall(r"Function : (\w*16attention_kernel\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    assert len(functions) == INSTANCES
    for name, body in functions.items():
        head_dim, keys = (256, 16) if "Li256E" in name else (128, 32 if "fp8" in name else 16)
        # One mma per 8 keys or columns and per 16 of head_dim or of keys.
        assert body.count("HMMA.16816") == 2 * (head_dim // 16) * (keys // 8), name
        assert not re.search(r"\b(STL|LDL)\b", body), name
        # Loads from gmem follow the wait for the previous kernel.
        assert "ACQBULK" in body and not re.search(r"\b(LDG|LDGSTS)\b", body.split("ACQBULK")[0]), name
        # After the ticket, 16 partial states are loaded before the first is added.
        ticket = body.index("ATOMG.E.INC.STRONG.GPU")
        first_add = body.index("FADD", body.index("LDG.E.128.STRONG.GPU", ticket))
        assert body[ticket:first_add].count("LDG.E.128.STRONG.GPU") >= 15, name
