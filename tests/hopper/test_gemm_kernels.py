"""Compiled code of the Hopper kernels of grouped products: no spills, no serialised products."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..support.device_code import assert_clean, compiled_for, sass_or_skip

pytestmark = pytest.mark.slow  # compiles kernels
HERE = Path(__file__).parent
TOKENS = (16, 32, 64, 96, 128, 160, 192, 224, 256)  # of a tile
TOKENS_OF_8_BITS, FEW_TOKENS = TOKENS[:6], TOKENS[:3]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the object file of gemm.cu and ptxas' output."""
    return compiled_for("90a", HERE / "gemm.cu", tmp_path_factory.mktemp("gemm"))


def test_ptxas_spills_nothing_and_serialises_nothing(compiled: tuple[Path, str]) -> None:
    assert_clean(compiled[1], "gemm_kernel", 4)


def test_each_size_has_its_products_and_boxes_come_by_tma(compiled: tuple[Path, str]) -> None:
    sass = sass_or_skip(compiled[0])
    functions = dict(re.findall(r"Function : (\w*gemm_kernel\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    assert len(functions) == 4
    for name, body in functions.items():
        eight, few = "fp8" in name, "GemmSizeE2" in name
        kind = "QGMMA.64x{}x32.F32.E4M3.E4M3" if eight else "HGMMA.64x{}x16.F32"
        if eight and "GemmSizeE0" in name:  # tokens are rows: half of a step, or a whole one
            assert body.count(kind.format(128)) == 12 and len(re.findall("QGMMA", body)) == 12
        else:
            for tokens in FEW_TOKENS if few else TOKENS_OF_8_BITS if eight else TOKENS:
                assert body.count(kind.format(tokens)) == 4, (name, tokens)
        # Weights once or twice, tokens multicast to both CTAs. Loads from gmem follow the wait for the
        # previous kernel.
        assert body.count("UTMALDG.3D.MULTICAST") == (0 if few else 3), name
        assert body.count("UTMALDG.3D") == (5 if "Lb0E" in name else 4), name
        assert body.count("UTMALDG.5D") == (0 if eight or "Lb0E" in name else 1), name  # halves with a gate
        assert ("UTMASTG" in body) == ("GemmSizeE0" in name), name  # TMA stores outputs of many tokens
        assert not re.search(r"\b(STL|LDL)\b", body), name
        assert "ACQBULK" in body and not re.search(r"\bLDG\b", body.split("ACQBULK")[0]), name
