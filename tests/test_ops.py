"""What holds for every public function that takes tensors: arguments that are none of those it has a kernel for."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashinfer
from flashinfer.ops import OPERATORS


def functions() -> list[str]:
    return [
        name
        for name in dir(flashinfer)
        if not name.startswith(("gen_", "get_act", "_")) and inspect.isfunction(getattr(flashinfer, name))
    ]


def with_tensors(name: str, tensor: object) -> list[object]:
    """The arguments that a function cannot be called without: ``tensor`` for tensors, 1 for numbers."""
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    return [1 if p.annotation in ("int", "float") else tensor for p in parameters if p.default is p.empty]


def test_all_are_found():
    assert {"rmsnorm", "silu_and_mul", "apply_rope", "append_paged_kv_cache", "merge_states", "packbits"} < set(
        functions()
    )


@pytest.mark.parametrize("name", functions())
def test_none(name):
    with pytest.raises(TypeError, match=r"^\w+: \w+: got None(Type)?, wanted Tensor$"):
        getattr(flashinfer, name)(*with_tensors(name, None))


@pytest.mark.parametrize("name", functions())
def test_sparse(name, device):
    sparse = torch.ones(4, 8, device=device).to_sparse()
    with pytest.raises(
        ValueError, match=r"^\w+: \w+: got a tensor of torch\.sparse_coo and torch\.float32, wanted a dense one$"
    ):
        getattr(flashinfer, name)(*with_tensors(name, sparse))


def test_sparse_beside_dense(device):
    x = torch.ones(4, 8, device=device)
    flashinfer.rmsnorm(x, x[0])  # the kernel is there
    with pytest.raises(ValueError, match="rmsnorm: weight: got a tensor of torch.sparse_coo"):
        flashinfer.rmsnorm(x, x[0].to_sparse())


def sample_calls(device: str) -> dict[str, tuple]:
    """Operators of every kind (returning, writing to out, in place, returning two) with arguments for them."""
    x, w = torch.randn(6, 64, device=device).half(), torch.ones(64, device=device).half()
    v, s = torch.randn(4, 8, 3, 16, device=device).half(), torch.randn(4, 8, 3, device=device)
    return {
        "rmsnorm": (x, w, 1e-6, None),
        "gemma_rmsnorm_out": (x.clone(), x, w, 1e-6, None),
        "fused_add_rmsnorm": (x.clone(), x.clone(), w, 1e-6, None),
        "layernorm": (x, w, w, 1e-6),
        "silu_and_mul": (x, None),
        "gelu_and_mul_out": (x[:, :32].clone(), x, None),
        "packbits": (torch.ones(37, dtype=torch.uint8, device=device), False),
        "merge_states": (v, s),
        "merge_state_in_place": (v[:, 0].clone(), s[:, 0].clone(), v[:, 1], s[:, 1], None),
    }


@pytest.mark.parametrize("name", sample_calls("cpu"))
def test_operators_keep_the_promises_of_their_schema(name, device):
    """Mutations, fake tensors, dynamic shapes, autograd: torch's own checks of a custom operator."""
    torch.library.opcheck(OPERATORS[name], sample_calls(device)[name])


def test_one_graph_from_public_functions(device):
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return flashinfer.silu_and_mul(flashinfer.rmsnorm(x, w)) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.randn(64, device=device)
    for tokens in (3, 5, 9):
        x = torch.randn(tokens, 64, device=device)
        torch.testing.assert_close(compiled(x, w), layer(x, w))
