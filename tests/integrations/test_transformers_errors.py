"""Models of transformers: what is not supported, and how our attention is registered."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flashinfer.errors import DependencyError
from flashinfer.integrations.transformers import attention_forward, register

from ..support.tree import ROOT, clean_environment
from .test_transformers import Pair, tokens_of


def attend(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, dim: int = 64, **options: Any) -> torch.Tensor:
    q, k = (torch.randn(2, heads, 3, dim, dtype=dtype, device=device) for heads in (4, 2))
    options = {"attention_mask": None} | options
    return attention_forward(SimpleNamespace(is_causal=True), q, k, k.clone(), **options)[0]


@pytest.mark.parametrize(
    "options, kind, message",
    [
        (dict(dropout=0.1), ValueError, "attention_dropout: got 0.1 in training, wanted 0"),
        (dict(output_attentions=True), ValueError, "output_attentions: got attention weights among the outputs"),
        (dict(s_aux=torch.ones(4)), ValueError, "s_aux: got attention sinks, wanted none"),
        (dict(position_bias=torch.ones(4)), ValueError, "position_bias: got a position bias, wanted none"),
        (dict(dtype=torch.float64), TypeError, r"got torch.float64 on \w+, wanted one of .*: load the model with dtype="),
        (dict(dim=60), ValueError, "head_dim: got 60, wanted"),
        (
            dict(attention_mask=torch.zeros(2, 1, 3, 3)),
            TypeError,
            "attention_mask: got torch.float32, wanted torch.bool, True if a query sees a key",
        ),
        *(
            (dict(attention_mask=torch.ones(*shape).bool()), ValueError, re.escape(f"got shape {list(shape)}, wanted"))
            for shape in ((3, 1, 3, 3), (2, 4, 3, 3), (2, 1, 2, 3), (2, 1, 3, 4))
        ),
    ],
)  # fmt: skip
def test_unsupported_options(options, kind, message, device):
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    assert attend(device).shape == (2, 3, 4, 64)
    with pytest.raises(kind, match=message):
        attend(device, **options)


def test_float32_on_cuda_and_other_devices():
    with pytest.raises(ValueError, match="fi_attention: query: got a tensor on meta, wanted one on cpu, cuda"):
        attend("meta")
    if torch.cuda.is_available():
        with pytest.raises(TypeError, match=r"got torch.float32 on cuda, wanted one of torch.float16, torch.bfloat16"):
            attend("cuda", torch.float32)


def test_errors_of_a_model(ours, device):
    pair = Pair("llama", (device, torch.bfloat16), attention_dropout=0.1)
    ids, _ = tokens_of(2, 5, "none", device)
    pair.model.train()
    with pytest.raises(ValueError, match="attention_dropout: got 0.1 in training, wanted 0"):
        pair.logits(ours, ids)


# Registration


def test_the_name(ours):
    assert register() == ours and ours in ALL_ATTENTION_FUNCTIONS
    assert "flash" not in ours, "transformers would take it for FlashAttention"


def test_the_examples_run():
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transformers.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "docs/transformers.md", "exec"), names)
    assert names["model"].config._attn_implementation == register()
    assert names["hybrid"](names["ids"]).logits.shape == (2, 12, 1000)


def test_nothing_is_imported_unasked():
    program = """
import sys, torch, flashinfer, flashinfer.integrations.transformers
assert "transformers" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=clean_environment()
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_transformers(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.9.1")
    with pytest.raises(DependencyError, match=r"got 5.9.1, wanted 5.17 or newer: pip install -e '\.\[transformers\]'"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DependencyError, match="transformers: cannot be imported") as caught:
        register()
    assert isinstance(caught.value, ImportError) and caught.value.library == "transformers"
