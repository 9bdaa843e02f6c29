"""Tests of captures and replays of every function and wrapper: new data, no synchronisation and no new memory.

Without a GPU, tests call the functions again instead of a replay, and compile them without Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flashinfer
from flashinfer.errors import CaptureError

from ..conftest import no_synchronisation
from ..support.attention_samples import samples
from ..support.samples import public_cases
from .test_compile import READS_A_VALUE

# torch's own, where Inductor is imported.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
    pytest.mark.usefixtures("cold_dynamo"),
]

SIZE, REPLAYS, MANY = 9, 20, 50
ATTENTION = [name for name, sample in samples("cpu").items() if sample.graph]
NAMES = [*(name for name in public_cases("cpu") if name not in READS_A_VALUE), *ATTENTION]
Inputs = dict[str, Any]


def call_of(name: str, device: str) -> tuple[Callable[..., Any], Callable[[], Inputs], tuple[str, ...]]:
    """Return a function, a function that draws its inputs, and the names of the inputs that it writes."""
    if name in ATTENTION:
        sample = samples(device)[name]
        sample.plan(SIZE)
        return sample.function, lambda: sample.inputs(SIZE), ()
    case = public_cases(device)[name]
    return case.function, lambda: case.arguments(SIZE), case.written


def tensors(result: Any, inputs: Inputs, written: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the results of a call and the inputs that it has written."""
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    return [*results, *(inputs[name] for name in written)]


def eager(function: Callable[..., Any], inputs: Inputs, written: tuple[str, ...]) -> list[torch.Tensor]:
    own = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    return tensors(function(**own), own, written)


class Graphed:
    """A function with its static inputs. A GPU captures its call."""

    def __init__(self, name: str, device: str, pool: Any = None) -> None:
        self.function, self.draw, self.written = call_of(name, device)
        self.inputs, self.graph = self.draw(), None
        flashinfer.warmup(lambda: self.function(**self.inputs))
        if device == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.results = tensors(self.function(**self.inputs), self.inputs, self.written)

    def __call__(self, inputs: Inputs) -> list[torch.Tensor]:
        for key, x in inputs.items():
            if isinstance(x, torch.Tensor):
                self.inputs[key].copy_(x)
        if self.graph is None:
            self.results = tensors(self.function(**self.inputs), self.inputs, self.written)
        else:
            self.graph.replay()
        return [one.clone() for one in self.results]

    def check(self, count: int, device: str) -> None:
        drawn = [self.draw() for _ in range(count)]
        want = [eager(self.function, inputs, self.written) for inputs in drawn]
        with no_synchronisation(device):
            got = [self(inputs) for inputs in drawn]
        assert_same(got, want)


def assert_same(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> None:
    for one, other in zip(got, want, strict=True):
        assert len(one) == len(other) > 0
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x, y, equal_nan=True)


def test_every_function_and_wrapper_is_listed():
    """Other tests check that the samples have every public function and wrapper."""
    assert set(NAMES) == (set(public_cases("cpu")) | set(samples("cpu"))) - READS_A_VALUE - {"convert_bsr_mask_layout"}


@pytest.mark.parametrize("name", NAMES)
def test_replays(name, device):
    Graphed(name, device).check(REPLAYS, device)


@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_flat(name, device):
    """Many replays keep no new memory."""
    graphed, held = Graphed(name, device), []
    inputs = graphed.draw()
    for _ in range(MANY if device == "cuda" else 2):
        results = graphed(inputs)
        del results
        if device == "cuda":
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(set(held[2:])) <= 1, "memory grows"


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("shared", [False, True], ids=["private pools", "one pool"])
def test_several_captures(shared, device):
    """Several graphs have private pools, or share one pool and are replayed in the order of their captures."""
    names = [
        "rmsnorm", "silu_and_mul", "apply_rope_pos_ids", "append_paged_kv_cache", "single_prefill_with_kv_cache alibi",
        "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "PODWithPagedKVCacheWrapper",
    ]  # fmt: skip
    pool = torch.cuda.graph_pool_handle() if shared and device == "cuda" else None
    graphs = [Graphed(name, device, pool) for name in names]
    for _ in range(3):
        for graphed in graphs:
            graphed.check(2, device)


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize("name", NAMES)
def test_reduce_overhead(name, device):
    """torch.compile captures functions by itself, except those that write their inputs."""
    function, draw, written = call_of(name, device)
    options = dict(mode="reduce-overhead") if device == "cuda" else dict(backend="aot_eager")
    compiled = torch.compile(function, fullgraph=True, **options)

    def call(inputs: Inputs) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return [one.clone() for one in tensors(compiled(**inputs), inputs, written)]

    count = REPLAYS if device == "cuda" else 2
    drawn = [draw() for _ in range(count + 3)]
    want = [eager(function, inputs, written) for inputs in drawn]
    got = [call(inputs) for inputs in drawn[:3]]  # compiled, warmed up, recorded
    with no_synchronisation(device):
        got += [call(inputs) for inputs in drawn[3:]]
    assert_same(got, want)
    assert counters["stats"]["unique_graphs"] == 1
    if not written and device == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0


def test_plan_in_a_capture_raises(device, monkeypatch):
    """The error does not end the capture. Without a GPU, a capture is simulated."""
    case = public_cases(device)["segment_packbits"]
    x = torch.zeros(4, device=device)
    case.function(**case.arguments(SIZE))
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        case.function(**case.arguments(SIZE))  # a CPU call is allowed
        with pytest.raises(CaptureError):
            samples(device)["BatchDecodeWithPagedKVCacheWrapper"].plan(SIZE)
        return
    arguments, sample = case.arguments(SIZE), samples(device)["BatchDecodeWithPagedKVCacheWrapper"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        for call in (lambda: case.function(**arguments), lambda: sample.plan(SIZE)):
            with pytest.raises(CaptureError, match="before the capture"):
                call()
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0] * 4
