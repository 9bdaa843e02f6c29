"""The example's layer: what is decoded absorbed has the logits of what is prefilled expanded."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("latent_attention")
    sys.modules.pop("latent_attention", None)


def test_absorbed_decoding_is_expanded_prefill(example, device):
    torch.manual_seed(random.randrange(2**31))
    sizes = example.Sizes(hidden=256, heads=random.choice((8, 16)), intermediate=320, vocabulary=64)
    layer = example.Layer(sizes, device, torch.bfloat16)
    prompts = [random.randrange(1, 150), 1, 64]
    tokens = [torch.randint(sizes.vocabulary, (n + 3,), device=device) for n in prompts]
    assert example.compare(layer, tokens, prompts, page_size=random.choice((1, 16, 64))) < 3e-2
