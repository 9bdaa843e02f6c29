"""Tests of the table of element types, and of functions that test for 8 bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer._ops import dtypes
from flashinfer.jit.modules import _attention
from flashinfer.jit.spec import DTYPES

HEADER = Path(__file__).resolve().parents[2] / "include/flashinfer/common/dtype.h"


def test_numbers_and_names_are_those_of_the_kernels():
    text = HEADER.read_text()
    values = re.search(r"enum class DType : int32_t \{(.*?)\}", text, re.S)[1].replace("\n", "").split(",")
    numbers = {name.strip(): number for number, name in enumerate(values)}
    names = dict(re.findall(r'case DType::(\w+): return "(\w+)"', text))
    for one in dtypes.ELEMENTS:
        kind = next(kind for kind, name in names.items() if name == one.name)
        assert numbers[kind] == one.number == dtypes.NUMBERS[one.dtype], one
    assert len(dtypes.ELEMENTS) == len(numbers) - 1, "but for kOther"


def test_sizes_and_kinds_are_torchs():
    for one in dtypes.ELEMENTS:
        assert one.bits == 8 * one.dtype.itemsize
        assert (one.kind == "float") == one.dtype.is_floating_point
    assert len({one.short for one in dtypes.ELEMENTS}) == len(dtypes.ELEMENTS)


def test_names_of_modules_follow_the_table():
    """The build system has names only, because it does not import torch."""
    short = {one.name: one.short for one in dtypes.ELEMENTS}
    assert {name: short[name] for name in _attention._SHORT} == _attention._SHORT
    assert {getattr(torch, name) for name in DTYPES} == set(dtypes.FLOATS)


OTHERS = [torch.uint8, torch.int8, torch.bool, *filter(None, [getattr(torch, "float4_e2m1fn_x2", None)])]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_one_byte_is_not_eight_bits_of_a_float(other, device):
    """A pair of 4-bit numbers also has an itemsize of 1. It must not count as fp8."""
    assert not dtypes.is_fp8(other) and all(map(dtypes.is_fp8, dtypes.FP8))
    bits = torch.zeros(5, 2, 64, dtype=torch.uint8, device=device)
    q = bits.bool() if other == torch.bool else bits.view(other)
    with pytest.raises((ValueError, TypeError), match=rf"^single_prefill_with_kv_cache: q: got {str(other)[6:]}"):
        flashinfer.single_prefill_with_kv_cache(q, q, q)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=device))
    indptr = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match=rf"Wrapper\.plan: q_data_type: got {str(other)[6:]}"):
        wrapper.plan(indptr, indptr, 2, 2, 64, q_data_type=other)
