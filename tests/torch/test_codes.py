"""Codes in graphs: engines pass ``AllReduceFusionPattern`` and its like to operators of their own, and compile them."""

import importlib
import pkgutil
from enum import Enum

import pytest
import torch
import torch._inductor.config
from torch._inductor.custom_graph_pass import CustomGraphPass

import flashinfer
from flashinfer._ops.codes import Code
from flashinfer.comm import AllReduceFusionPattern


def codes() -> list[type[Enum]]:
    """Return every enumeration of integers that a public module exports."""
    found: dict[str, type[Enum]] = {}
    for module in pkgutil.walk_packages(flashinfer.__path__, "flashinfer."):
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        names = importlib.import_module(module.name)
        for name in getattr(names, "__all__", ()):
            value = getattr(names, name)
            if isinstance(value, type) and issubclass(value, Enum) and issubclass(value, int):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return list(found.values())


def test_the_text_of_a_code_is_its_number() -> None:
    found = codes()
    assert {"AllReduceFusionPattern", "ActivationType", "TopKTieBreak"} <= {code.__name__ for code in found}
    for code in found:
        assert issubclass(code, Code), f"{code} has a repr that is no expression"
        for member in code:
            assert repr(member) == str(member) == f"{member}" == str(int(member))


class NameThePattern(CustomGraphPass):
    """Puts a code in the place of the number, as vLLM's pass that fuses an all-reduce with a norm does."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.codes_of_a_test.add.default:
                node.args = (node.args[0], AllReduceFusionPattern.kARResidualRMSNorm)

    def uuid(self) -> None:
        """Return None: the cache of graphs is not used."""


@pytest.mark.slow
def test_inductor_writes_codes_into_its_program() -> None:
    with torch.library._scoped_library("codes_of_a_test", "FRAGMENT") as library:
        library.define("add(Tensor x, int pattern) -> Tensor")
        library.impl("add", lambda x, pattern: x + pattern, "CompositeExplicitAutograd")
        torch.library.register_fake("codes_of_a_test::add", lambda x, pattern: torch.empty_like(x), lib=library)
        x = torch.randn(5)
        with torch._inductor.config.patch(post_grad_custom_post_pass=NameThePattern()):
            compiled = torch.compile(lambda x: torch.ops.codes_of_a_test.add(x, 1), fullgraph=True)
            torch.testing.assert_close(compiled(x), x + 1)
