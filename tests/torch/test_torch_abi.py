"""Tests that modules use only symbols of the oldest supported torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile

from flashinfer.jit import build_jit_specs
from flashinfer.jit.modules import Matrix, axes, families, matrix_specs
from flashinfer.jit.spec import TORCH_ABI

# Functions of torch 2.10 that modules call. Add only functions that torch 2.10 exports.
EXPORTED_BY_TORCH_2_10 = {
    *("aoti_torch_abi_version", "aoti_torch_device_type_cpu", "aoti_torch_device_type_cuda"),
    *("aoti_torch_delete_library_object", "aoti_torch_library_def", "aoti_torch_library_init_def"),
    *(
        "aoti_torch_library_init_impl",
        "aoti_torch_library_init_fragment",
        "torch_library_impl",
        "torch_get_num_threads",
        "torch_parallel_for",
    ),
    *("aoti_torch_copy_", "aoti_torch_delete_tensor_object", "aoti_torch_empty_strided", "aoti_torch_is_defined"),
    *("aoti_torch_get_data_ptr", "aoti_torch_get_device_index", "aoti_torch_get_device_type", "aoti_torch_get_dim"),
    *("aoti_torch_get_dtype", "aoti_torch_get_numel", "aoti_torch_get_sizes", "aoti_torch_get_strides"),
    *("aoti_torch_dtype_bfloat16", "aoti_torch_dtype_bool", "aoti_torch_dtype_element_size"),
    *("aoti_torch_dtype_float16", "aoti_torch_dtype_float32", "aoti_torch_dtype_float64"),
    *("aoti_torch_dtype_float8_e4m3fn", "aoti_torch_dtype_float8_e5m2", "aoti_torch_dtype_int32"),
    *(
        "aoti_torch_dtype_int16",
        "aoti_torch_dtype_int8",
        "aoti_torch_dtype_int64",
        "aoti_torch_dtype_uint16",
        "aoti_torch_dtype_uint32",
        "aoti_torch_dtype_uint8",
    ),
    *("aoti_torch_get_current_cuda_stream", "torch_c10_cuda_check_msg", "torch_c10_cuda_free_error_msg"),
    *("aoti_torch_create_device_guard", "aoti_torch_delete_device_guard", "aoti_torch_get_current_device_index"),
}


def asked_of_torch(path: Path) -> set[str]:
    """Return the undefined symbols of a library that belong to torch by name."""
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        names = {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}
    return {name for name in names if any(word in name for word in ("torch", "c10", "aoti"))}


@pytest.mark.parametrize("family", families())
def test_modules_run_with_the_oldest_torch(family, device):
    # Modules that other tests load too, so that this test builds nothing.
    narrow = {"dtypes": ("float32" if device == "cpu" else "float16",), "head_dims": ("64",)}
    of_heads = "head_dims" in {axis.name for axis in axes([family])}
    specs = matrix_specs(Matrix(backends=(device,), **(narrow if of_heads else {})), [family])
    asked = {name for artifact in build_jit_specs(specs) for name in asked_of_torch(artifact.path)}
    assert TORCH_ABI == (2, 10), "the names above are those of 2.10"
    assert "torch_library_impl" in asked, "a module registers its kernels"
    assert asked <= EXPORTED_BY_TORCH_2_10, asked - EXPORTED_BY_TORCH_2_10


def test_newer_torch_has_all_functions():
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    missing = {name for name in EXPORTED_BY_TORCH_2_10 if "cuda" not in name and not hasattr(library, name)}
    assert not missing
