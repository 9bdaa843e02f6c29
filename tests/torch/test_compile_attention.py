"""Tests of attention under ``torch.compile``: one graph for all shapes, plans and numbers, and eager's values."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashinfer

from ..support.attention_samples import Sample, own_variants, samples, values
from ..support.tree import clean_environment
from .test_ops import functions

NAMES = list(samples("cpu"))
OWN = [name for name in functions() if name.endswith("_with_jit_module")]
SIZES, MORE_SIZES = (9, 4, 11, 13, 19, 10), (5, 22, 7)


pytestmark = pytest.mark.usefixtures("cold_dynamo")


def compiled_of(sample: Sample, dynamic: bool | None = True) -> Any:
    return torch.compile(sample.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")


def check(compiled: Any, sample: Sample, inputs: dict[str, Any]) -> None:
    torch.testing.assert_close(compiled(**inputs), sample.function(**inputs), equal_nan=True)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_every_function_and_wrapper_is_here():
    public = [getattr(flashinfer, name) for name in dir(flashinfer) if name[0] != "_"]
    wrappers = {
        one.__name__
        for one in public
        if isinstance(one, type)
        and (hasattr(one, "run") or hasattr(one, "forward"))
        and not one.__module__.startswith(("flashinfer.logits_processor", "flashinfer.mla", "flashinfer._gemm"))
    }
    # One class under a second name; its run is its base's.
    wrappers -= {"CUDAGraphBatchDecodeWithPagedKVCacheWrapper"}
    attention = set(flashinfer.prefill.__all__) | set(flashinfer.decode.__all__) | set(flashinfer.sparse.__all__)
    assert {name.split()[0] for name in NAMES} | set(OWN) == wrappers | (attention & set(functions()))


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_plans_make_one_graph(name, device):
    sample = samples(device)[name]
    compiled = compiled_of(sample)
    for size in SIZES:
        sample.plan(size)
        check(compiled, sample, sample.inputs(size))
    assert graphs() == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in MORE_SIZES:
            sample.plan(size)
            check(compiled, sample, sample.inputs(size))


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("name", NAMES)
def test_unbacked_sizes(name, device):
    sample = samples(device)[name]
    compiled = compiled_of(sample)
    for size in (9, 23, 14):
        sample.plan(size)
        inputs, others = sample.inputs(size), sample.inputs(2 * size)
        want = sample.function(**inputs)
        for key, x in inputs.items():
            for dim in range(x.dim() if isinstance(x, torch.Tensor) else 0):
                if x.shape[dim] != others[key].shape[dim]:
                    torch._dynamo.decorators.mark_unbacked(x, dim)
        torch.testing.assert_close(compiled(**inputs), want, equal_nan=True)
    assert graphs() == 1


def twelve(numbers: tuple[str, ...]) -> list[dict[str, float]]:
    """Return the numbers of twelve calls. Each number differs in every call, so a specialised one makes more graphs."""
    columns = [random.sample(values(number, 12), 12) for number in numbers]
    return [dict(zip(numbers, row, strict=True)) for row in zip(*columns, strict=True)]


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [name for name in NAMES if samples("cpu")[name].numbers])
def test_twelve_values_of_the_numbers_make_two_graphs_at_most(name, dynamic, device):
    sample = samples(device)[name]
    sample.plan(9)
    compiled, inputs = compiled_of(sample, dynamic), sample.inputs(9)
    for numbers in twelve(sample.numbers):
        check(compiled, sample, inputs | numbers)
    for number in sample.numbers:
        first, last = (compiled(**inputs | numbers | {number: values(number, 12)[one]}) for one in (0, -1))
        with pytest.raises(AssertionError):  # it changes something
            torch.testing.assert_close(first, last)
    assert 1 <= graphs() <= 2, sample.numbers


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [name for name in NAMES if samples("cpu")[name].plan_numbers])
def test_twelve_plans_make_two_graphs_at_most(name, dynamic, device):
    """Numbers of plan() make at most two graphs. The wrapper is an attribute of a module."""
    sample = samples(device)[name]

    class Layer(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return sample.function(**inputs)

    compiled = torch.compile(Layer(), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for numbers in twelve(sample.plan_numbers):
        sample.plan(9, **numbers)
        check(compiled, sample, sample.inputs(9))
    assert 1 <= graphs() <= 2, sample.plan_numbers


@pytest.mark.slow  # builds two modules
@pytest.mark.parametrize("name", OWN)
def test_custom_variants(name, device):
    sample = own_variants(device)[name]
    compiled = compiled_of(sample)
    for size in SIZES:
        check(compiled, sample, sample.inputs(size))
    assert graphs() == 1


def test_scales_in_tensors_are_not_read(device):
    """The kernel reads scales of one element. Results equal those with numbers."""
    sample = samples(device)["BatchDecodeWithPagedKVCacheWrapper"]
    compiled = compiled_of(sample)
    sample.plan(9)
    for _ in range(3):
        scales = {name: torch.rand((), device=device) + 0.5 for name in sample.numbers}
        inputs = sample.inputs(9)
        numbers = {name: float(scale) for name, scale in scales.items()}
        torch.testing.assert_close(compiled(**inputs, **scales), sample.function(**inputs, **numbers))
    assert graphs() == 1


def test_unbacked_sizes_that_do_not_fit_the_plan(device):
    """The graph checks unbacked sizes when it runs, and does not read beyond a tensor's end."""
    sample = samples(device)["BatchPrefillWithRaggedKVCacheWrapper"]
    sample.plan(9)
    inputs, compiled = sample.inputs(9), compiled_of(sample)
    for key in ("q", "k", "v"):
        torch._dynamo.decorators.mark_unbacked(inputs[key], 0)
    check(compiled, sample, sample.inputs(9))
    compiled(**inputs)
    sample.plan(10)
    with pytest.raises(Exception, match="queries"):
        compiled(**inputs)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
def test_plan_breaks_the_graph(device):
    """plan() ends a graph. With ``fullgraph=True`` it raises an error."""
    sample = samples(device)["BatchPrefillWithRaggedKVCacheWrapper"]

    def step(size: int, inputs: dict[str, Any]) -> Any:
        sample.plan(size)
        return sample.function(**inputs)

    compiled = torch.compile(step, backend="aot_eager")
    for size in (4, 7):
        inputs = sample.inputs(size)
        torch.testing.assert_close(compiled(size, inputs), step(size, inputs))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"plan\(\): got a call under torch.compile, wanted it outside"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(9, sample.inputs(9))


COLD = """
import pathlib, sys, torch, flashinfer
from tests.support.attention_samples import samples
sample = samples(sys.argv[1])["single_prefill_with_kv_cache packed"]
inputs = sample.inputs(5)
got = torch.compile(sample.function, fullgraph=True)(**inputs)
torch.testing.assert_close(got, sample.function(**inputs))
"""


@pytest.mark.slow
def test_a_cold_process_with_an_empty_cache(device, tmp_path: Path):
    root = Path(flashinfer.__file__).parents[1]
    places = dict(FLASHINFER_WORKSPACE_DIR=tmp_path / "ours", TORCHINDUCTOR_CACHE_DIR=tmp_path / "torchs")
    environment = clean_environment(**places)
    command = [sys.executable, "-c", COLD, device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
