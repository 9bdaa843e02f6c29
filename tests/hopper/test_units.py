"""Hopper building blocks (cuda/ptx, cuda/tile, cuda/host) on a 9.0 device, against float64.

With nvcc only: the kernels compile for 9.0a, and ptxas neither serialises a product nor spills.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..support.device_code import nvcc_or_skip

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
PRODUCTS = (
    "bf16 128 64 k ss", "bf16 128 80 k ss", "f16 128 128 k ss", "bf16 64 48 k ss", "f16 32 16 k rs",
    "bf16 128 256 n ss", "bf16 128 192 n rs", "f16 64 96 n ss", "bf16 32 32 n rs", "bf16 128 160 k rs",
    "e4m3 128 128 k ss",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the library of units.cu and the compilers' output."""
    library = tmp_path_factory.mktemp("units") / "units.so"
    command = [
        nvcc_or_skip(), "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", "-Xptxas=-v", "-Xcompiler=-fPIC",
        "-shared", "-cudart=static", f"-I{INCLUDE}", str(HERE / "units.cu"), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library, done.stdout + done.stderr


@pytest.fixture(scope="module")
def units(built: tuple[Path, str]) -> Callable[..., None]:
    """Return a function that calls the library by name and raises its errors."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wanted a GPU of compute capability 9.0")
    torch.zeros(1, device="cuda")
    library = ctypes.CDLL(str(built[0]))
    library.units_error.restype = ctypes.c_char_p

    def call(name: str, *args: object) -> None:
        given = [ctypes.c_void_p(arg.data_ptr()) if isinstance(arg, torch.Tensor) else arg for arg in args]
        torch.cuda.synchronize()
        if getattr(library, f"units_{name}")(*given) != 0:
            raise RuntimeError(library.units_error().decode())

    return call


@pytest.mark.slow
def test_ptxas_keeps_products_asynchronous(built: tuple[Path, str]) -> None:
    said = built[1]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert len(spills) == len(PRODUCTS) + 3
    assert set(spills) == {("0", "0")}
    assert not re.findall(r"C75\d\d", said), said


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(units: Callable[..., None], name: str) -> None:
    kind, _, columns, major, _ = name.split()
    n, k = int(columns), 256 if kind == "e4m3" else 128
    a = torch.randn(64, k, device="cuda").to(DTYPES[kind])
    b = torch.randn(*((k, n) if major == "n" else (n, k)), device="cuda").to(DTYPES[kind])
    out = torch.full((64, n), float("nan"), device="cuda")
    units("product", name.encode(), a, b, out)
    wanted = a.double() @ (b.double() if major == "n" else b.double().T)
    error = ((out.double() - wanted).norm() / wanted.norm()).item()
    assert error < (1e-3 if kind == "e4m3" else 1e-6)  # products of 8 bits are summed with about 14


@pytest.mark.parametrize("start", [-5, 0, 3, 70, 90, 200])
def test_box_outside_of_a_tensor_is_zero_and_is_not_stored(units: Callable[..., None], start: int) -> None:
    rows = 100
    x = torch.randn(rows, 64, device="cuda").bfloat16()
    seen = torch.full((32, 64), float("nan"), device="cuda").bfloat16()
    stored = torch.full((rows + 40, 64), 7.0, device="cuda").bfloat16()
    to = max(start, 0)  # a store from a negative row is an illegal instruction
    units("box", x, rows, seen, stored, start, to)
    wanted, wanted_stored = torch.zeros_like(seen), torch.full_like(stored, 7.0)
    for n in range(32):
        if 0 <= start + n < rows:
            wanted[n] = x[start + n]
    count = max(min(rows - to, 32), 0)
    wanted_stored[to : to + count] = wanted[:count]
    assert torch.equal(seen, wanted)
    assert torch.equal(stored, wanted_stored)


def test_ring_passes_each_number_once(units: Callable[..., None]) -> None:
    sums = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    units("pass_through", sums, 1000)
    assert sums.tolist() == [999 * 1000 // 2] * 64


def test_stored_matrix(units: Callable[..., None]) -> None:
    matrix = torch.randint(-(2**15), 2**15, (16, 16), dtype=torch.int16, device="cuda")
    plain, transposed = torch.zeros_like(matrix), torch.zeros_like(matrix)
    units("store_matrix", matrix, plain, transposed)
    assert torch.equal(plain, matrix)
    assert torch.equal(transposed, matrix.T)


def test_map_of_an_odd_stride_is_refused(units: Callable[..., None]) -> None:
    x = torch.zeros(4, 72, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="64:1:64, 4:65:4"):
        units("map_of_odd_stride", x)
