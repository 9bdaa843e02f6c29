"""Tests of every public function that takes tensors: calls without a kernel raise errors, operators keep their schema."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashinfer
import flashinfer._attention.equal_batch  # for transformers
import flashinfer._attention.traced  # its operator is registered where a graph is traced
import flashinfer.comm.allreduce  # the package does not export these operators
import flashinfer.comm.alltoall
import flashinfer.comm.shares
from flashinfer._ops.declare import OPERATORS
from flashinfer.errors import FlashInferError, GradientError
from flashinfer.utils import is_sm90a_supported

from ..support.opcheck import opcheck
from ..support.samples import operator_calls

# Modules whose functions take no tensors: stubs, the tuner, pipelines.
APART = ("flashinfer._compat.refused", "flashinfer._compat.autotuner", "flashinfer.logits_processor")


def functions() -> list[str]:
    """Return the names of the functions that take tensors and have kernels, each by its first name."""
    found = {name: getattr(flashinfer, name) for name in dir(flashinfer)}
    return [
        name
        for name, one in found.items()
        if not name.startswith(("gen_", "get_act", "_", "warmup"))
        and inspect.isfunction(one)
        and one.__name__ == name
        and not inspect.unwrap(one).__globals__["__name__"].startswith(APART)
        and takes_tensors(one)
    ]


def takes_tensors(function: Callable[..., object]) -> bool:
    """Return whether a function requires a tensor. Methods of wrappers do not count."""
    parameters = inspect.signature(function).parameters
    required = (str(one.annotation) for one in parameters.values() if one.default is one.empty)
    return "self" not in parameters and any("Tensor" in annotation for annotation in required)


def call_with(name: str, tensor: object) -> None:
    """Call a function with its required arguments: ``tensor`` for tensors, 1 for numbers."""
    function = getattr(flashinfer, name)
    required = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
    given = {one.name: 1 if one.annotation in ("int", "float") else tensor for one in required}
    positional = [given.pop(one.name) for one in required if one.kind is not one.KEYWORD_ONLY]
    function(*positional, **given)


def test_all_are_found():
    assert {"rmsnorm", "silu_and_mul", "apply_rope", "append_paged_kv_cache", "merge_states", "packbits"} < set(
        functions()
    )


@pytest.mark.parametrize("name", functions())
def test_none(name):
    with pytest.raises(TypeError, match=r"^\w+: \w+: got None(Type)?, wanted Tensor$"):
        call_with(name, None)


@pytest.mark.parametrize("name", functions())
def test_sparse(name, device):
    sparse = torch.ones(4, 8, device=device).to_sparse()
    with pytest.raises(
        ValueError, match=r"^\w+: \w+: got a tensor of torch\.sparse_coo and torch\.float32, wanted a dense one$"
    ):
        call_with(name, sparse)


def test_sparse_next_to_dense(device):
    x = torch.ones(4, 8, device=device)
    flashinfer.rmsnorm(x, x[0])  # loads the kernel
    with pytest.raises(ValueError, match="rmsnorm: weight: got a tensor of torch.sparse_coo"):
        flashinfer.rmsnorm(x, x[0].to_sparse())


def portable(name: str) -> str:
    """Return the operator of the portable kernels that has the same arguments as an operator for one arch.

    Operators with a profiler have more arguments, and those with scales other ones, and so samples of their own.
    """
    namespace, _, name = name.rpartition("::")
    return name + "".join(f"+{kind}" for kind in ("profiler", "scaled") if namespace.endswith(kind))


def test_every_operator_has_a_sample():
    assert set(operator_calls("cpu")) == {portable(name) for name in OPERATORS}


def test_every_registered_operator_is_listed():
    """Operators of attention's modules have other namespaces, see tests/attention/test_bound.py."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flashinfer::")}
    assert registered == {f"flashinfer::{name}" for name in OPERATORS if name == portable(name)}


@pytest.mark.slow_beyond(30)
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_opcheck(name, device):
    """torch's checks of custom operators: mutations, fake tensors, dynamic shapes and autograd."""
    assert torch.Tag.pt2_compliant_tag in OPERATORS[name].tags
    if "sm90a" in name and not (device == "cuda" and is_sm90a_supported(torch.device(device))):
        pytest.skip("kernels for Hopper only")
    if "scaled" in name and device == "cpu":
        pytest.skip("kernels for GPUs only")
    for arguments in operator_calls(device)[portable(name)]:
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if any(
            isinstance(one, torch.Tensor) and one.dtype.itemsize == 1 and one.is_floating_point() for one in arguments
        ):
            assert_writes_match_schema(OPERATORS[name], arguments)  # test_schema cannot compare fp8
        else:
            checks.append("test_schema")
        opcheck(OPERATORS[name], arguments, test_utils=checks)


def assert_writes_match_schema(operator, arguments) -> None:
    """Check that an operator writes to exactly the arguments that its schema marks."""
    given = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    operator(*given)
    for argument, one, before in zip(operator._schema.arguments, given, arguments, strict=True):
        if isinstance(one, torch.Tensor):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and argument.name == "order":  # its writes are declared so that graphs keep the order of calls
                continue
            assert one.flatten().view(torch.uint8).equal(before.flatten().view(torch.uint8)) != written, argument.name


@pytest.mark.parametrize("name", sorted(name for name in OPERATORS if f"{name}_autograd" in OPERATORS))
def test_inference_operators_run_no_python(name, device):
    """They have no Autograd kernel. After the first call, the module's kernel is registered for the backend."""
    OPERATORS[name](*operator_calls(device)[name][0])
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has(f"flashinfer::{name}", "Autograd") and has(f"flashinfer::{name}_autograd", "Autograd")
    assert has(f"flashinfer::{name}", device.upper())


def test_error_without_a_gradient(device):
    """The error comes before anything is written. Under no_grad() the call works."""
    v, s = torch.randn(4, 3, 16, device=device), torch.randn(4, 3, device=device)
    wanted = v.clone().requires_grad_()
    with pytest.raises(FlashInferError, match="merge_state: has no gradient, wanted tensors that require none"):
        flashinfer.merge_state(wanted, s, v, s)
    before = v.clone()
    with pytest.raises(GradientError, match="merge_state_in_place: has no gradient"):
        flashinfer.merge_state_in_place(v, s, wanted, s)
    assert torch.equal(v, before)
    with torch.no_grad():
        assert not flashinfer.merge_state(wanted, s, v, s)[0].requires_grad


class Watched(torch.Tensor):
    """A tensor subclass that records the functions called with it."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def calls_of(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls by a part of their operator's name. ``x``: ``[tokens, 64]``."""
    weight, out = x.detach().clone()[0], torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return {
        "rmsnorm": lambda: flashinfer.rmsnorm(x, weight),
        "rmsnorm_out": lambda: flashinfer.rmsnorm(x, weight, out=out),
        "merge_state": lambda: flashinfer.merge_state(x[:, None], x[:, :1].float(), x[:, None], x[:, :1].float()),
        "run": lambda: flashinfer.single_decode_with_kv_cache(x, x[:, None], x[:, None]),
    }


@pytest.mark.parametrize("way", ["class", "function", "dispatch", "profiler"])
def test_fast_path_keeps_subclasses_modes_and_the_profiler(way, device):
    """Eager calls skip torch's wrapper, but tensor subclasses, modes and the profiler still see the operator."""
    x, seen = torch.randn(4, 64, dtype=torch.bfloat16, device=device), []
    wanted = {name: call() for name, call in calls_of(x).items()}

    class Function(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **kwargs or {})

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **kwargs or {})

    def profiler() -> torch.profiler.profile:
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)

    ways = {"class": contextlib.nullcontext, "function": Function, "dispatch": Dispatch, "profiler": profiler}
    if way == "class":
        x, Watched.seen = x.as_subclass(Watched), seen
    for name, call in calls_of(x).items():
        seen.clear()
        with ways[way]() as watching:
            got = call()
        if way == "profiler":
            seen += [event.key.replace("::", ".") for event in watching.key_averages()]
        assert any(one.removesuffix(".default").split(".")[-1].startswith(name) for one in seen), (name, seen)
        torch.testing.assert_close(got, wanted[name], rtol=0, atol=0)


def test_one_graph_from_public_functions(device):
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return flashinfer.silu_and_mul(flashinfer.rmsnorm(x, w)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.randn(64, device=device)
    for tokens in (3, 5, 9):
        x = torch.randn(tokens, 64, device=device)
        torch.testing.assert_close(compiled(x, w), layer(x, w))
