"""What holds for every public function that takes tensors: arguments that are none of those it has a kernel for."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashinfer


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
