"""What the compilers make of the Hopper kernels of multi-head latent attention: products that run by themselves, no spills."""

from __future__ import annotations

import re
from pathlib import Path

from ..support.device_code import compiled_for_hopper

HERE = Path(__file__).parent
INSTANCES = 2  # by the copy engine, and gathered


def test_ptxas_serialises_and_spills_nothing(tmp_path: Path) -> None:
    _, said = compiled_for_hopper(HERE / "mla.cu", tmp_path)
    assert len(re.findall(r"Compiling entry function '\w*sm9010mla_kernel\w*'", said)) == INSTANCES, said
    assert not re.findall(r"C75\d\d", said), said
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) > INSTANCES and set(spills) == {("0", "0", "0")}, said
