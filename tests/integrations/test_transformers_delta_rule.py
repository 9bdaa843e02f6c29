"""Tests of hybrid models of transformers with our delta rule: logits, gradients and tokens, in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from flashinfer.integrations.linear_attention import modules_of
from flashinfer.integrations.transformers import register_delta_rule

from ..support.transformers_models import CACHE

# Each token goes to both experts. If it went to one, rounding could choose between equal scores.
SIZES = dict(
    vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.15, pad_token_id=0, bos_token_id=1,
    eos_token_id=None, layer_types=["linear_attention", "full_attention"], moe_intermediate_size=16, num_experts=2,
    num_experts_per_tok=2, tie_word_embeddings=True,
)  # fmt: skip
HEADS = dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=20,
    linear_conv_kernel_dim=4,
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", dict(HEADS, shared_expert_intermediate_size=16)),
    "kimi_linear": (
        "KimiLinear",
        dict(
            linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=4, kv_lora_rank=16, q_lora_rank=None,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=2, num_key_value_heads=3,
        ),
    ),
    "olmo_hybrid": ("OlmoHybrid", HEADS),
    "qwen3_5": ("Qwen3_5", HEADS),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(HEADS, shared_expert_intermediate_size=16)),
    "qwen4_exp": (
        "Qwen4Exp",
        dict(
            HEADS, shared_expert_intermediate_size=16, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16,
            indexer_budget=64, indexer_compress_ratio=4,
        ),
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    pytest.importorskip(f"transformers.models.{name}", reason="this release of transformers has no such model")
    return name


@pytest.fixture
def model(kind: str, device: str) -> torch.nn.Module:
    name, more = KINDS[kind]
    of_text = getattr(transformers, f"{name}TextConfig", None)  # of multimodal models
    config = (of_text or getattr(transformers, f"{name}Config"))(**SIZES | more)
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device).eval()


@pytest.fixture
def ours(kind: str):
    """Return a function that runs another with our kernels."""

    def run(function: Any, *args: Any) -> Any:
        undo = register_delta_rule(kind)
        try:
            return function(*args)
        finally:
            undo()

    return run


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def piecewise(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Run a prompt, then one token at a time through the cache."""
    with torch.no_grad():
        result = model(ids[:, :9], use_cache=True)
        found = [result.logits]
        for token in ids[:, 9:].split(1, dim=1):
            result = model(token, **{CACHE: getattr(result, CACHE)}, use_cache=True)
            found.append(result.logits)
    return torch.cat(found, 1)


def tokens(model: torch.nn.Module, count: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(2, 61, (rows, count), device=model.device)


def test_prefill_and_decode(model, ours):
    ids = tokens(model, 30)
    want = logits(model, ids)
    assert float(want.std()) > 0.1
    torch.testing.assert_close(ours(logits, model, ids), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(piecewise, model, ids), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(piecewise(model, ids), want, rtol=1e-4, atol=1e-4)  # as before


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi_linear"], indirect=True)
def test_generate(model, ours):
    ids = tokens(model, 9)
    made = ours(lambda: model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False))
    assert made.shape == (2, 29) and torch.equal(made[:, :9], ids)
    want = logits(model, made)[:, 8:-1]
    best, taken = want.amax(-1), want.gather(-1, made[:, 9:, None]).squeeze(-1)
    # Two nearly equal logits may swap: each has an absolute and relative error of 1e-4, as above.
    assert bool((best - taken <= 2e-4 * (1 + best.abs())).all())


@pytest.mark.slow_beyond(3)
def test_training(model, ours):
    ids = tokens(model, 21)

    def gradients(one: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = one(ids, labels=ids, use_cache=False).loss
        leaves = [leaf for leaf in one.parameters() if leaf.requires_grad]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return loss, [torch.zeros(()) if grad is None else grad for grad in grads]

    want, got = gradients(model), ours(gradients, copy.deepcopy(model))
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    largest = max(float(grad.abs().max()) for grad in want[1])
    for one, other in zip(got[1], want[1], strict=True):  # a gate's gradient is a sum whose terms cancel
        torch.testing.assert_close(one, other, rtol=5e-3, atol=1e-4 * float(other.abs().max()) + 3e-5 * largest)


def test_undo_restores_the_functions(kind):
    (module,) = modules_of((kind,))
    names = [name for name in vars(module) if "conv1d" in name or "delta" in name or name.endswith("RMSNormGated")]
    before = {name: vars(module)[name] for name in names}
    norm = next(one for name, one in before.items() if name.endswith("RMSNormGated"))
    forward, undo = norm.forward, register_delta_rule(kind)
    assert norm.forward is not forward
    assert sum(vars(module)[name] is not one for name, one in before.items()) == 4
    undo()
    assert norm.forward is forward and all(vars(module)[name] is one for name, one in before.items())


def test_an_unknown_model():
    with pytest.raises(ValueError, match="register_delta_rule: model_type: got 'llama', wanted one of kimi_linear"):
        register_delta_rule("llama")
