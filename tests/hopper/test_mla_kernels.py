"""Compiled code of the Hopper kernels of multi-head latent attention: asynchronous products, no spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.device_code import assert_clean, compiled_for

pytestmark = pytest.mark.slow  # compiles kernels
HERE = Path(__file__).parent
INSTANCES = 2  # loads by TMA, and gathered loads


def test_ptxas_serialises_and_spills_nothing(tmp_path: Path) -> None:
    _, said = compiled_for("90a", HERE / "mla.cu", tmp_path)
    assert_clean(said, "sm9010mla_kernel", INSTANCES)
