"""The example's models: compiled training is eager training, decoding is the form over chunks, and graphs are few."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._dynamo.utils import counters

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [
    # torch's own, where Inductor is imported.
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning"),
    pytest.mark.usefixtures("cold_dynamo"),
]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("train_delta_net")
    for name in ("train_delta_net", "delta_net"):
        sys.modules.pop(name, None)


@pytest.fixture(params=[False, True], ids=["delta", "gated"])
def model(example, request, device) -> torch.nn.Module:
    torch.manual_seed(random.randrange(2**31))
    return example.LanguageModel(50, hidden=48, layers=1, heads=3, gated=request.param).to(device)


def tokens(model: torch.nn.Module, rows: int, length: int) -> torch.Tensor:
    return torch.randint(50, (rows, length), device=model.norm.device)


def test_steps_are_the_form_over_chunks(model):
    """Logits of each token, whatever was a prompt before it; and so the tokens that a prompt is followed by."""
    given = tokens(model, 3, 70)
    with torch.no_grad():
        want = model(given)
        logits, states = model.prefill(given[:, :9])
        got = [*logits.unbind(1), *(model.step(one, states) for one in given[:, 9:].unbind(1))]
        torch.testing.assert_close(torch.stack(got, 1), want, rtol=2e-4, atol=2e-4)
        made = model.generate(given[:, :5], 20)
        assert made.shape == (3, 25) and torch.equal(made[:, :5], given[:, :5])
        best, second = model(made)[:, 4:-1].topk(2).values.unbind(-1)
        clear = best - second > 1e-3  # of two tokens as likely either may be taken
        assert torch.equal(model(made)[:, 4:-1].argmax(-1)[clear], made[:, 5:][clear])


@pytest.mark.slow_beyond(1)
def test_a_training_step_is_one_graph(model):
    """Six lengths, three more, and twelve scales."""
    compiled = torch.compile(model.loss, fullgraph=True, dynamic=True, backend="aot_eager")

    def check(length: int, scale: float | None) -> None:
        given = tokens(model, 2, length)
        grads = []
        for function in (compiled, model.loss):
            model.zero_grad()
            function(given, scale).backward()
            grads.append([one.grad.clone() for one in model.parameters()])
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)

    for length in (5, 64, 65, 66, 101, 131):
        check(length, None)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (7, 130, 200):
            check(length, None)
    check(20, 0.1)  # a number in the place of none is another graph
    graphs = counters["stats"]["unique_graphs"]
    for number in range(12):
        check(20 + number, 0.15 + number / 20)
    assert counters["stats"]["unique_graphs"] == graphs <= 3


@pytest.mark.slow
def test_training_compiled_by_inductor(example, model):
    """Losses of twenty steps are eager's, the graph is one, and nothing that Inductor wrote is of these operators."""
    from torch._inductor.utils import run_and_get_code

    text, start = torch.randint(50, (2000,)), {name: one.clone() for name, one in model.state_dict().items()}
    how = dict(rows=2, lengths=(20, 90), quiet=True)
    want = example.train(model, text, 20, False, **how)
    model.load_state_dict(start)
    got, sources = run_and_get_code(lambda: example.train(model, text, 20, True, **how))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-3, atol=2e-3)
    written = "\n".join(sources)
    for operator in ("delta_rule_autograd", "delta_rule_backward", "causal_conv1d_autograd", "causal_conv1d_backward"):
        assert f"flashinfer.{operator}" in written  # called, not looked into
    kernels = re.findall(r"async_compile\.(?:triton|cpp_pybinding)\(.*?'''(.*?)'''", written, re.DOTALL)
    assert kernels
    for kernel in kernels:
        code = "\n".join(line for line in kernel.splitlines() if not line.lstrip().startswith(("#", "//")))
        code = re.sub(r"\btriton_\w+", "", code)  # names that Inductor makes of those of the operators beside a kernel
        assert not re.search(r"delta_rule|conv1d|gated_rmsnorm", code)


def test_it_learns(example, device):
    """A few steps on the repository's own text; the loss curves are a picture."""
    torch.manual_seed(0)
    text, alphabet = example.characters()
    model = example.LanguageModel(len(alphabet), hidden=32, layers=1, heads=2).to(device)
    losses = example.train(model, text, 25, False, rows=4, lengths=(32, 64), rate=1e-2, quiet=True)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.7
    drawn = example.picture({"Gated DeltaNet": losses, "half of it": losses[:12]})
    assert drawn.count("<polyline") == 2 and drawn.startswith("<svg") and "Gated DeltaNet" in drawn
