"""Compiled code of the Hopper prefill kernel: asynchronous products, no spills, tensor cores.

ptxas serialises a product if a register of it is touched too early. Results stay correct at half the speed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ..support.device_code import assert_clean, compiled_for, nvcc_or_skip, sass_or_skip

HERE = Path(__file__).parent
INSTANCES = 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the object file of prefill.cu and ptxas' output."""
    return compiled_for("90a", HERE / "prefill.cu", tmp_path_factory.mktemp("prefill"))


@pytest.mark.slow
def test_ptxas_serialises_and_spills_nothing(compiled: tuple[Path, str]) -> None:
    assert_clean(compiled[1], "sm9016attention_kernel", INSTANCES)


@pytest.mark.slow
def test_products_run_on_the_tensor_cores(compiled: tuple[Path, str]) -> None:
    """For 64 rows and a tile of keys, S takes head_dim / 16 instructions and O keys / 16 (8 bits: / 32)."""
    sass = sass_or_skip(compiled[0])
    functions = dict(re.findall(r"Function : (\w*sm90\w*)\n(.*?)(?=Function :|\Z)", sass, re.S))
    assert len(functions) == INSTANCES
    for name, body in functions.items():
        eight = "fp8_e4m3" in name
        head_dim, keys = (128, 96) if eight else (128, 80) if "Li128ELi128E" in name else (256, 64)
        # S of the first tile, whole or half, of tiles with a mask and of tiles without. O of the latter two
        # and of the last tile.
        products, step = ("QGMMA", 32) if eight else ("HGMMA", 16)
        firsts = 1 if "Li256ELi256E" in name else 2  # variants that change logits compute no half tiles
        assert body.count(products) == (firsts + 2) * (head_dim // step) + 3 * (keys // step), name
        assert not re.search(r"\b(STL|LDL|HMMA)\b", body), name
        assert body.count("USETMAXREG") == 2, name


def test_ctas_take_each_number_once_and_about_as_much(tmp_path: Path) -> None:
    said = ran_on_the_host(HERE / "snake_schedule.cu", tmp_path)
    assert all(float(busiest) < 1.1 for busiest in said.split()), said


def test_warpgroups_skip_exactly_the_keys_that_no_row_sees(tmp_path: Path) -> None:
    assert int(ran_on_the_host(HERE / "borders.cu", tmp_path)) > 1000  # half tiles at the end


def ran_on_the_host(source: Path, folder: Path) -> str:
    program = folder / source.stem
    command = [nvcc_or_skip(), "-std=c++17", "-arch=sm_90", f"-I{HERE.parents[1] / 'include'}", str(source)]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    return ran.stdout
