"""Tests of the routing of calls to operators: optional tensors, gradients and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashinfer
from flashinfer._ops.route import Fallback, routed

from ..support.cases import Case
from ..support.samples import public_cases


def clamped(fallback: Fallback) -> Any:
    """Return ``clamp(self, min, max)`` with optional bounds, routed to two operators of torch."""
    return routed("clamp", torch.ops.aten.clamp.Tensor, fallback)


def test_an_optional_tensor_without_gradient():
    """Only the upper bound of ``clamp`` is given, and only it requires a gradient."""
    taken = []

    def with_gradient(*args: Any) -> torch.Tensor:
        taken.append(args)
        return torch.clamp(*args)

    call = clamped(Fallback(with_gradient, ("min", "max")))
    x, most = torch.randn(7), torch.zeros(7, requires_grad=True)
    call(x, None, most).sum().backward()
    assert len(taken) == 1
    torch.testing.assert_close(most.grad, (x > 0).float())
    with torch.no_grad():
        assert torch.equal(call(x, None, most), x.clamp(max=0))
    assert torch.equal(call(x, None, most.detach()), x.clamp(max=0)) and len(taken) == 1


def test_a_string_in_place_of_a_tensor():
    call = clamped(Fallback(torch.clamp, ("min", "max")))
    with pytest.raises(TypeError, match="clamp: min: got str, wanted Optional"):
        call(torch.randn(3), "zero", None)


def test_an_error_of_the_operator_does_not_repeat_the_call():
    """An AttributeError of the operator is passed on. It does not mean that an argument is not a tensor."""
    calls = []

    def fail(*args: Any) -> None:
        calls.append(args)
        raise AttributeError("from inside")

    name = "fails_inside"
    library = torch.library.Library("flashinfer_tests_of_routes", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> ()")
    library.impl(name, fail, "CompositeExplicitAutograd")
    operator = torch.ops.flashinfer_tests_of_routes.fails_inside.default
    x = torch.randn(3)
    for call in (routed(name, operator, None), routed(name, operator, Fallback(fail, ("x",)))):
        for given in (x, x.clone().requires_grad_()):
            calls.clear()
            with pytest.raises(AttributeError, match="from inside"):
                call(given)
            assert len(calls) == 1


def misplaced(case: Case, name: str) -> dict[str, Any]:
    arguments = case.arguments(9)
    return arguments | {name: arguments[name].to("meta")}


CASES = [
    (name, argument)
    for name, case in public_cases("cpu").items()
    for argument, value in case.arguments(9).items()
    if isinstance(value, torch.Tensor) and (name, argument) != ("segment_packbits", "x")  # indptr may be on the host
]


@pytest.mark.parametrize(("name", "argument"), CASES)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_tensor_on_another_device_is_an_error_that_names_both(name, argument, gradients, device):
    """A meta tensor would turn the whole call into a fake one."""
    case = public_cases(device)[name]
    if sum(isinstance(value, torch.Tensor) for value in case.arguments(9).values()) == 1:
        pytest.skip("has one tensor")
    if gradients and not case.differentiable:
        pytest.skip("has no gradient")
    arguments = misplaced(case, argument)
    if gradients:
        for one in case.differentiable:
            arguments[one] = arguments[one].requires_grad_() * 1  # not a leaf: those cannot be written
    # The first tensor sets the device.
    with pytest.raises(
        ValueError, match=r": \w+: got a tensor on (meta, wanted .*(cpu|cuda)|(cpu|cuda).*, wanted .* meta)"
    ):
        case.function(**arguments)


@pytest.mark.parametrize(("name", "argument"), CASES)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_the_host_among_those_of_a_gpu(name, argument):
    """Python checks the first call. The loaded module checks later calls, so a correct call comes first."""
    case = public_cases("cuda")[name]
    arguments = case.arguments(9)
    if sum(isinstance(value, torch.Tensor) for value in arguments.values()) == 1:
        pytest.skip("has one tensor")
    if (name, argument) == ("segment_packbits", "indptr"):
        pytest.skip("may be on the host")
    case.function(**arguments)
    with pytest.raises(ValueError, match=r"(cpu.*cuda:0|cuda:0.*cpu)"):
        case.function(**arguments | {argument: arguments[argument].cpu()})


def test_all_on_meta_is_no_error():
    x, weight = torch.randn(3, 64, device="meta"), torch.randn(64, device="meta")
    assert flashinfer.rmsnorm(x, weight).device.type == "meta"


def test_out_of_memory_error(device):
    """Engines catch OutOfMemoryError. The output would have 2**46 rows, and nothing is read."""
    rows = torch.ones(32, device=device).expand(1 << 46, 32)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for an output"):
        flashinfer.rmsnorm(rows, torch.ones(32, device=device))
