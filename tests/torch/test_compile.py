"""Tests of every public function under ``torch.compile``: one graph for all shapes and numbers, and eager's values."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashinfer.comm

from ..support.cases import Case, values
from ..support.samples import public_cases
from .test_ops import functions

CASES = list(public_cases("cpu"))
# Their result's length is the value of a tensor. It is a size of the graph only with capture_scalar_outputs.
READS_A_VALUE = {"segment_packbits"}
# tests/prefill/test_prefill.py compiles them. Custom modules and block masks are made outside of graphs.
ATTENTION = {
    "convert_bsr_mask_layout",
    "single_decode_with_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_with_jit_module",
}
SIZES, MORE_SIZES = (5, 7, 11, 12, 19, 31), (6, 40, 57)


pytestmark = pytest.mark.usefixtures("cold_dynamo")


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def allowed(name: str) -> contextlib.AbstractContextManager[Any]:
    return (
        torch._dynamo.config.patch(capture_scalar_outputs=True) if name in READS_A_VALUE else contextlib.nullcontext()
    )


def called(function: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Call a function. Return its results and its tensor arguments, which it may have written."""
    result = function(**arguments)
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return [*results, *(value for value in arguments.values() if isinstance(value, torch.Tensor))]


def run(function: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Call a function with copies of the arguments, like :func:`called`."""
    own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    return called(function, own)


def check(compiled: Any, case: Case, arguments: dict[str, Any]) -> None:
    for got, want in zip(run(compiled, arguments), run(case.function, arguments), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def has_gradients(case: Case) -> bool:
    return bool(case.numbers and case.differentiable) and not case.written


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_every_public_function_is_here():
    elsewhere = {
        "pad_indptr_to_multiple_of_4",  # the number of its rows depends on values
        # They prepare weights when a model is loaded, before any graph.
        "quantize_mxfp4",
        "dequantize_mxfp4",
        "interleave_moe_weights_for_sm90_mixed_gemm",
        "interleave_moe_scales_for_sm90_mixed_gemm",
        *flashinfer.comm.__all__,  # they need a workspace: tests/comm/test_allreduce.py compiles the one that is traced
    }
    assert {name.split()[0] for name in CASES} == set(functions()) - ATTENTION - elsewhere


@pytest.mark.slow_beyond(8)
def test_sizes_make_one_graph(name, device):
    case = public_cases(device)[name]
    with allowed(name):
        compiled = torch.compile(case.function, fullgraph=True, dynamic=True, backend="aot_eager")
        for size in SIZES:
            check(compiled, case, case.arguments(size))
        assert graphs() == 1
        with torch._dynamo.config.patch(error_on_recompile=True):
            for size in MORE_SIZES:
                check(compiled, case, case.arguments(size))


@pytest.mark.slow_beyond(8)
def test_unbacked_sizes(name, device):
    """The graph may not assume that an unbacked size differs from 0 and 1."""
    case = public_cases(device)[name]
    with allowed(name):
        compiled = torch.compile(case.function, fullgraph=True, dynamic=True, backend="aot_eager")
        for size in (9, 23, 14):
            arguments = case.arguments(size)
            for key, value in arguments.items():
                if isinstance(value, torch.Tensor) and value.shape != case.arguments(2 * size)[key].shape:
                    torch._dynamo.decorators.mark_unbacked(value, 0)
            want = run(case.function, arguments)
            for one, other in zip(called(compiled, arguments), want, strict=True):
                torch.testing.assert_close(one, other, equal_nan=True)
        assert graphs() == 1


def twelve(case: Case) -> list[dict[str, float]]:
    """Return the numbers of twelve calls. Each number differs in every call, so a specialised one makes more graphs."""
    columns = [random.sample(values(number, 12), 12) for number in case.numbers]
    return [dict(zip(case.numbers, row, strict=True)) for row in zip(*columns, strict=True)]


@pytest.mark.slow_beyond(12)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [name for name in CASES if public_cases("cpu")[name].numbers])
def test_twelve_values_of_the_numbers_make_two_graphs_at_most(name, dynamic, device):
    case = public_cases(device)[name]
    compiled = torch.compile(case.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    arguments = case.arguments(9)
    for numbers in twelve(case):
        check(compiled, case, arguments | numbers)
    assert 1 <= graphs() <= 2, case.numbers


@pytest.mark.slow_beyond(12)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [name for name in CASES if has_gradients(public_cases("cpu")[name])])
def test_numbers_and_gradients(name, dynamic, device):
    """Numbers make at most two graphs with gradients, too."""
    case = public_cases(device)[name]
    compiled = torch.compile(case.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for numbers in twelve(case):
        arguments = case.arguments(9) | numbers
        leaves = [arguments[key].requires_grad_() for key in case.differentiable]
        outputs = [function(**arguments) for function in (compiled, case.function)]
        results = [[out] if isinstance(out, torch.Tensor) else list(out) for out in outputs]
        grads = [torch.randn_like(one) for one in results[0]]
        got, want = (torch.autograd.grad(one, leaves, grads) for one in results)
        for one, other in zip((*results[0], *got), (*results[1], *want), strict=True):
            torch.testing.assert_close(one, other)
    assert 1 <= graphs() <= 2, case.numbers
