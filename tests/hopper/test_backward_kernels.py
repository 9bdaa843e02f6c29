"""Compiled code of the Hopper kernel of attention's gradients: see test_prefill_kernels.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import assert_clean, compiled_for, sass_or_skip

pytestmark = pytest.mark.slow  # compiles kernels
HERE = Path(__file__).parent
INSTANCES = 4  # two element types, two sizes of heads


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the object file of backward.cu and ptxas' output."""
    return compiled_for("90a", HERE / "backward.cu", tmp_path_factory.mktemp("backward"))


def test_ptxas_serialises_and_spills_nothing(compiled: tuple[Path, str]) -> None:
    assert_clean(compiled[1], "sm9015backward_kernel", INSTANCES)


def test_products_run_on_the_tensor_cores(compiled: tuple[Path, str]) -> None:
    sass = sass_or_skip(compiled[0])
    functions = dict(re.findall(r"Function : (\w*sm9015backward_kernel\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    assert len(functions) == INSTANCES
    for name, body in functions.items():
        head_dim, queries = (128, 64) if "Li128E" in name else (64, 128)
        # S of the first tile and of the next, and dP. Then dV and dK, which sum over queries, and dQ over 128
        # keys.
        assert body.count("HGMMA") == 3 * (head_dim // 16) + 2 * (queries // 16) + 128 // 16, name
        assert not re.search(r"\b(STL|LDL|HMMA)\b", body), name
        assert body.count("USETMAXREG") == 2, name
