"""Configured operators of any family: one module per configuration, loaded once, traceable by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer._ops.configured import configured, has_dispatching_module, load_configured
from flashinfer._ops.errors import raise_from_module
from flashinfer.jit import JitSpec, gen_jit_spec
from flashinfer.jit.artifact import Artifact, publish

from ..support.opcheck import opcheck

SOURCE = r"""
#include "binding/binding.h"
namespace flashinfer::binding {
Tensor filled(const Tensor& input) {
  const Check check("filled");
  const View x(input, "input");
  check.dtype(x, {DType::kFloat32});
  Tensor output = empty_like(x, input);
  const View y(output, "output");
  for (int64_t i = 0; i < y.numel; ++i) static_cast<float*>(y.data)[i] = NUMBER;
  return output;
}
}
#define OPERATORS(ns) OPERATORS_(ns)
#define OPERATORS_(ns)                                                            \
  STABLE_TORCH_LIBRARY(ns, m) { m.def("filled(Tensor input) -> Tensor"); }        \
  STABLE_TORCH_LIBRARY_IMPL(ns, CPU, m) { m.impl("filled", flashinfer::binding::box<flashinfer::binding::filled>); }
OPERATORS(FLASHINFER_NAMESPACE)
"""


def fake(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.shape)


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[[int], JitSpec]:
    """Return a family with one operator, which fills a tensor with the number of its module."""
    (tmp_path / "filled.cc").write_text(SOURCE)

    def spec_of(number: int) -> JitSpec:
        name = f"filled_{tmp_path.name.replace('-', '_')}_{number}"
        return gen_jit_spec(name, [tmp_path / "filled.cc"], extra_cflags=["-O0", f"-DNUMBER={number}"])

    return spec_of


def test_a_module_for_each_configuration(spec_of):
    asked = []

    def specs(number: int) -> JitSpec:
        asked.append(number)
        return spec_of(number)

    operators = configured(specs, {"filled": fake, "another": fake})
    x = torch.randn(2, 3)
    for _ in range(2):
        assert torch.equal(operators(7).filled(x), torch.full((2, 3), 7.0))
    assert torch.equal(operators(9).filled(x), torch.full((2, 3), 9.0))
    assert asked == [7, 9], "each configuration is looked up once"

    filled = operators(7).filled
    assert torch.Tag.pt2_compliant_tag in filled.default.tags
    assert filled(x.to("meta")).shape == (2, 3)
    opcheck(filled.default, (x,))
    compiled = torch.compile(lambda x: filled(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torch.full((2, 3), 8.0))

    for bad, kind, message in (
        (x.double(), TypeError, "fill: input: got float64, wanted float32"),
        (x.to_sparse(), ValueError, "fill: input: got a tensor of torch.sparse_coo, wanted a dense one"),
    ):
        with pytest.raises(RuntimeError) as refused:
            filled(bad)
        with pytest.raises(kind, match=message):
            raise_from_module("fill", ("input",), (bad,), refused.value)


def test_a_module_of_several_stands_in_where_it_was_built_ahead_of_time(spec_of, tmp_path, monkeypatch):
    """A dispatching module is used if it covers the configuration and no specialised module exists."""
    coverage = {"tile": ["64", "128"]}
    several = spec_of(5).covering(coverage)
    found: Artifact = several.build()
    publish(found.path, found.manifest, tmp_path / "aot" / several.name)
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(tmp_path / "aot"))

    def one(tile: str, **change: Any) -> JitSpec:
        base = replace(spec_of(5).covering({"tile": [tile]}), **change)
        return replace(
            base, name=f"{several.name}_{tile}", namespace=f"{several.name}_{tile}", dispatching=several.name
        )

    assert has_dispatching_module(one("64")) and not has_dispatching_module(one("256"))
    assert not has_dispatching_module(one("64", cflags=("-O1",))), "it has other flags"
    assert load_configured(one("64")).name == several.name == load_configured(one("128")).name
    assert torch.equal(load_configured(one("64")).filled(torch.zeros(2)), torch.full((2,), 5.0))
