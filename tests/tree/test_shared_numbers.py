"""Numbers that Python and C++ share: each language defines them once, and they are equal."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer import utils
from flashinfer._attention import arguments, lists
from flashinfer._ops.scalars import numbers_of
from flashinfer._profiler import buffer
from flashinfer.jit.modules import _attention
from flashinfer.jit.spec import DTYPES

from ..support.tree import ROOT

TEXT = "\n".join(
    path.read_text()
    for folder in ("include", "csrc")
    for path in sorted((ROOT / folder).rglob("*.*h*"))
    if path.is_file()
)


def enumerators(name: str, text: str = TEXT) -> dict[str, int]:
    """Return the names and values of an enumeration, with ``kMultiItem`` as ``MULTI_ITEM``."""
    (body,) = re.findall(rf"enum (?:class )?{name}\b[^{{;]*\{{([^}}]*)\}}", text)
    values, following = {}, 0
    for word in filter(None, (one.strip() for one in re.sub(r"//.*", "", body).split(","))):
        enumerator, _, value = word.partition("=")
        following = int(value) if value else following
        values[as_constant(enumerator.strip())] = following
        following += 1
    return values


def as_constant(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def test_enumerations_are_read():
    text = "enum class Mode : int32_t { kOne, kTwoWords = 5, kThree, };  // kNot\nenum Other { kA };"
    assert enumerators("Mode", text) == {"ONE": 0, "TWO_WORDS": 5, "THREE": 6}
    with pytest.raises(ValueError):
        enumerators("Mode", text + text)


def test_modes():
    masks = enumerators("MaskMode")
    assert masks == {"NONE": 0, "CAUSAL": 1, "CUSTOM": 2, "MULTI_ITEM": 3}
    assert list(masks.values()) == [one.value for one in utils.MaskMode]
    assert [one.name for one in utils.MaskMode][1:] == ["CAUSAL", "CUSTOM", "MULTIITEMSCORING"]
    assert masks == {
        "NONE": arguments.NON_CAUSAL,
        "CAUSAL": arguments.CAUSAL,
        "CUSTOM": arguments.CUSTOM,
        "MULTI_ITEM": arguments.MULTI_ITEM,
    }
    positions = enumerators("PosEncodingMode")
    assert positions == arguments.POS_ENCODINGS == {one.name: one.value for one in utils.PosEncodingMode}
    assert {one.name: one.value for one in utils.TensorLayout} == arguments.LAYOUTS


def test_fields_of_a_plan():
    fields = enumerators("PlanField")
    assert fields == {name: getattr(lists, f"_{name}") for name in fields}


def test_bits_of_a_variant():
    bits = {name: re.findall(rf"\bk{name} = (\d+)", TEXT) for name in ("SoftCap", "Alibi", "Rope")}
    assert {as_constant(name).lower(): [str(bit)] for name, bit in _attention.VARIANT_BITS.items()} == {
        as_constant(name).lower(): found for name, found in bits.items()
    }


def test_numbers_of_attention():
    """The order is that in which kernels read device values."""
    given = {"LOGITS_SOFT_CAP": 7.0, "SM_SCALE": 0.5, "ROPE_SCALE": 2.0, "ROPE_THETA": 3.0}
    numbers = numbers_of(tuple(given.values()), torch.tensor(1.0, dtype=torch.float64), torch.device("cpu"))
    assert numbers is not None
    assert {name: numbers[place].item() for name, place in enumerators("Number").items()} == given


def test_events_of_kernels():
    words = {"QUERY": "q", "KEYS": "k", "VALUES": "v", "MAXIMA": "max", "WEIGHTS": "p", "OUTPUT": "o"}
    names = {
        "-".join(words.get(one, one.lower()) for one in name.split("_")): n for name, n in enumerators("Event").items()
    }
    assert names == {name: number for number, name in enumerate(buffer.EVENT_NAMES)}
    assert enumerators("Clock") == {"CYCLES": buffer.CYCLES, "NANOSECONDS": buffer.NANOSECONDS}
    assert enumerators("EventKind") == {one.name.removeprefix("k").upper(): one.value for one in buffer.EventType}
    assert re.findall(r"\bkTrackWords = (\d+)", TEXT) == [str(buffer.TRACK_WORDS)]


def test_element_types():
    """torch's names equal those of C++'s messages and of the configuration's types."""
    (body,) = re.findall(r"to_string\(DType dtype\) \{(.*?)\n\}", TEXT, re.DOTALL)
    names = dict(re.findall(r'case DType::k(\w+): return "(\w+)";', body))
    assert {as_constant(name) for name in names} == enumerators("DType").keys() - {"OTHER"}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names.values())
    for template in (ROOT / "csrc").glob("*config.h.jinja"):
        for name, enumerator in re.findall(r'"(\w+)": \("k(\w+)", "', template.read_text()):
            assert names[enumerator] == name
    assert {*DTYPES, *_attention.DTYPES} <= set(names.values())
    (body,) = re.findall(r"DType to_dtype\(int32_t type\) \{(.*?)\n  \}", TEXT, re.DOTALL)
    seen = dict(re.findall(r"aoti_torch_dtype_(\w+)\(\)\) return DType::k(\w+);", body))
    assert {enumerator: name for name, enumerator in seen.items()} == names
