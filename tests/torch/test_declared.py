"""Tests of saved programs: a process that has only imported the package finds their operators."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer._ops.schemas import SCHEMAS

from ..support.processes import python_path
from ..support.tree import ROOT

OPERATORS = [schema[: schema.index("(")] for schemas in SCHEMAS.values() for schema in schemas]


def run(program: str, *arguments: str | Path) -> str:
    """Run a program that has torch and the package, with this process's settings; warnings are errors."""
    text = f"import sys, torch, flashinfer\nbefore = set(sys.modules)\n{program}"
    command = [sys.executable, "-W", "error", "-c", text, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_dispatcher_knows_every_operator():
    program = "print(*(name for name in torch._C._dispatch_get_all_op_names() if name.startswith('flashinfer')))"
    assert sorted(run(program).split()) == sorted(OPERATORS)


def test_python_imports_the_operators_module():
    program = """
packet = torch.ops.flashinfer.rmsnorm_quant
assert {name for name in sys.modules if name.startswith("flashinfer.norm")} == {"flashinfer.norm_quant"}
from flashinfer._ops.declare import OPERATORS
assert OPERATORS["rmsnorm_quant"] is packet.default
assert not hasattr(torch.ops.flashinfer, "no_such_operator")
x = torch.randn(3, 64)
got = torch.ops.flashinfer.rmsnorm(x, torch.ones(64), 1e-6, None)
torch.testing.assert_close(got, flashinfer.rmsnorm(x, torch.ones(64)))
"""
    run(program)


@pytest.mark.parametrize("gradient", [False, True])
def test_cpp_finds_the_kernel(gradient):
    """A C++ call of the dispatcher does not read ``torch.ops``. It loads the module and records the gradient."""
    name, rest = ("silu_and_mul_autograd", "(None,)") if gradient else ("silu_and_mul", "(None,)")
    program = f"""
call, _, _ = torch._C._get_operation_overload("flashinfer::{name}", "")
x = torch.randn(5, 96, requires_grad={gradient})
out = call(x, *{rest})
a, b = x.detach().double().requires_grad_().chunk(2, -1)
want = torch.nn.functional.silu(a) * b
torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
assert "flashinfer.activation" in sys.modules and "flashinfer.norm" not in sys.modules
if {gradient}:
    # The first call is recorded; torch would warn that it might not be, which is an error here.
    a, b = (one.detach().double().requires_grad_() for one in x.chunk(2, -1))
    (torch.nn.functional.silu(a) * b).sum().backward()
    out = call(x, *{rest})
    out.sum().backward()
    torch.testing.assert_close(x.grad.double(), torch.cat([a.grad, b.grad], -1), rtol=1e-4, atol=1e-5)
"""
    run(program)


def test_an_exported_program_is_loaded_and_trained(tmp_path):
    """A training program is saved here and loaded in another process."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return flashinfer.rmsnorm(x, self.weight)

    model, x = Norm(), torch.randn(7, 64)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "program.pt2")
    model(x).square().sum().backward()
    torch.save({"x": x, "out": model(x).detach(), "grad": model.weight.grad}, tmp_path / "wanted")
    program = """
import warnings
warnings.simplefilter("default")  # torch's own while it loads
wanted = torch.load(sys.argv[2])
program = torch.export.load(sys.argv[1]).module()
out = program(wanted["x"])
torch.testing.assert_close(out, wanted["out"])
out.square().sum().backward()
torch.testing.assert_close(program.weight.grad, wanted["grad"])
"""
    run(program, tmp_path / "program.pt2", tmp_path / "wanted")


def test_a_schema_that_is_not_the_listed_one_is_refused():
    program = """
import flashinfer._ops.declare as declare
try:
    declare.define_in_python("rmsnorm(Tensor input) -> Tensor", lambda x: x)
except RuntimeError as err:
    assert str(err).startswith("flashinfer::rmsnorm: got schema rmsnorm(Tensor input) -> Tensor, listed is"), err
    assert str(err).endswith("run python scripts/init_stub.py"), err
else:
    raise AssertionError("taken")
"""
    run(program)
