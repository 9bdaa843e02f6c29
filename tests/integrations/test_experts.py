"""Tests of experts in models of transformers: layers as exact as eager ones, and routers with the same choice."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flashinfer.errors import GradientError
from flashinfer.fused_moe import RoutingMethodType, route
from flashinfer.integrations.transformers import register, register_experts

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "gemm-moe.md"
SIZES = dict(
    vocab_size=61, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=64, initializer_range=0.15, pad_token_id=0,
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=8, num_experts_per_tok=2)),
    "deepseek": (
        "DeepseekV3",
        dict(
            n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, moe_intermediate_size=40,
            first_k_dense_replace=0, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32,
            qk_nope_head_dim=32, v_head_dim=64, head_dim=32,
        ),
    ),
}  # fmt: skip
LEAST = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def layers(kind: str, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the MoE layer of a model, and the same layer in float32 by transformers."""
    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}Model")(config).eval()
    layer = model.layers[1].mlp
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    if kind == "deepseek":
        layer.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    reference = copy.deepcopy(layer)
    return layer.to(device, dtype), reference.to(device)


def run(layer: Any, x: torch.Tensor, implementation: str) -> torch.Tensor:
    layer.experts.config._experts_implementation = implementation
    with torch.no_grad():
        return layer(x)


@pytest.mark.parametrize("dtype", list(LEAST), ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers(kind, dtype, device):
    ours = register_experts()
    layer, reference = layers(kind, device, dtype)
    # Both route in float32, so that they choose the experts of the reference.
    layer.gate.float()
    route_of = layer.gate.forward
    layer.gate.forward = lambda x: route_of(x.float())
    for shape in ((1, 1), (3, 21), (2, 64)):
        x = torch.randn(*shape, 96, device=device).to(dtype)
        want = run(reference, x.float(), "eager")
        got, peer = run(layer, x, ours), run(layer, x, "eager")
        error, theirs = ((one.float() - want).norm() for one in (got, peer))
        assert got.dtype == dtype and error <= max(2 * theirs, LEAST[dtype] * want.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_models_generate_the_same(kind, device):
    if device == "cuda" and kind == "deepseek":
        pytest.skip("its heads have sizes that our attention has no CUDA kernels for")
    name, options = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(device, dtype)
    if kind == "mixtral":
        model.set_attn_implementation(register())
    ids, chosen = torch.randint(1, 61, (2, 9), device=device), []
    model.model.layers[-1].mlp.gate.register_forward_hook(lambda *call: chosen.append(call[-1][2].sort(-1).values))
    logits = []
    for implementation in ("eager", register_experts()):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            logits.append(model(ids).logits.float())
    # Other rounding in the first layer may change the choice between two experts of nearly equal score in the last.
    same = (chosen[0] == chosen[1]).all(-1).view(2, 9)
    assert same.sum() >= 16
    eager, ours = (one[same] for one in logits)
    assert (ours - eager).norm() <= (1e-4 if dtype == torch.float32 else 3e-2) * eager.norm()


def clear(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows whose choice does not depend on float32 rounding."""
    best = scores.sort(-1, descending=True).values
    return best[:, count - 1] - best[:, count] > 1e-6


def test_routers_choose_the_same(device):
    x = torch.randn(200, 96, device=device)
    layer = layers("mixtral", device, torch.float32)[0]
    logits, weights, ids = layer.gate(x)
    got, chosen = route(logits.detach(), 2, RoutingMethodType.Renormalize)
    scores = logits.detach().double().softmax(-1)
    rows = clear(scores, 1) & clear(scores, 2)
    assert rows.sum() > 190 and chosen[rows].long().equal(ids[rows])
    torch.testing.assert_close(got, weights.detach(), rtol=1e-5, atol=1e-6)
    layer = layers("deepseek", device, torch.float32)[0]
    logits, weights, ids = layer.gate(x)
    bias = layer.gate.e_score_correction_bias
    got, chosen = route(
        logits.detach(), 4, RoutingMethodType.DeepSeekV3, bias=bias, n_group=4, topk_group=2,
        routed_scaling_factor=layer.gate.routed_scaling_factor,
    )  # fmt: skip
    scores = (logits.detach().double().sigmoid() + bias.double()).view(200, 4, 4)
    of_group = scores.topk(2, -1).values.sum(-1)
    in_group = torch.zeros_like(of_group).scatter_(1, of_group.topk(2, -1).indices, 1.0).bool()
    rows = clear(of_group, 2) & clear(scores.masked_fill(~in_group[..., None], -torch.inf).flatten(1), 4)
    dense = [
        torch.zeros(200, 16, device=device).scatter_(1, i.long(), w)[rows]
        for i, w in ((ids, weights.detach()), (chosen, got))
    ]
    assert rows.sum() > 190
    torch.testing.assert_close(*dense, rtol=1e-5, atol=1e-6)


def test_the_documents_examples_run():
    """The examples of experts, one after the other: 16-bit weights, then MXFP4."""
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for example, hidden in zip(examples[-2:], (64, 128), strict=True):
        exec(compile(example, DOCUMENT.name, "exec"), names)
        assert names["out"].shape == (5, hidden) and names["out"].isfinite().all()


def test_unsupported_experts(device):
    ours = register_experts()
    layer, _ = layers("mixtral", device, torch.float32)
    x = torch.randn(2, 3, 96, device=device)
    with pytest.raises(GradientError, match="has no gradient"):
        layer.experts.config._experts_implementation = ours
        layer(x)
    layer.experts.is_concatenated = False
    with pytest.raises(ValueError, match="interleaved"):
        run(layer, x, ours)
    layer.experts.is_concatenated, layer.experts.act_fn = True, torch.nn.Mish()
    with pytest.raises(ValueError, match="act_fn: got Mish"):
        run(layer, x, ours)
    layer.experts.act_fn, layer.experts.has_post_expert_norm = torch.nn.SiLU(), True
    with pytest.raises(ValueError, match="a norm after each expert"):
        run(layer, x, ours)
    config = transformers.GptOssConfig(
        **SIZES | dict(num_local_experts=4, num_hidden_layers=1, layer_types=["full_attention"])
    )
    model = transformers.GptOssModel(config).eval()
    model.set_experts_implementation(ours)
    with torch.no_grad(), pytest.raises(ValueError, match="its own gate"):
        model(torch.ones(1, 2, dtype=torch.int64))
