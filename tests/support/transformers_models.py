"""Small transformers models with random weights, and their logits in float32."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers

VOCABULARY, WINDOW = 61, 6
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.15, pad_token_id=0,
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "gemma2": ("Gemma2", dict(sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)),
    # Attention layers have windows, but do not pass them to the attention function.
    "qwen2_moe": (
        "Qwen2Moe",
        dict(
            sliding_window=WINDOW, use_sliding_window=True, layer_types=["sliding_attention", "full_attention"],
            num_experts=2, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            num_attention_heads=2, hidden_size=128,
        ),
    ),
}  # fmt: skip
# Caches hold latents. Attention functions get keys of 192 and values of 128 that were computed from them.
LATENT = dict(
    kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=48, num_key_value_heads=4,
    first_k_dense_replace=2,
)  # fmt: skip
PADDINGS = ("none", "left", "right")
# Name of a model's cache: transformers 5.24 renamed the argument and the output.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
# Our error may exceed that of ``eager`` in the same dtype by this factor, both as norms over all logits. The
# largest single error is random, most of all after a router of experts.
FACTOR, LEAST = 2.0, {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class Pair:
    """A model with random weights, and the same in float32 with transformers' own attention.

    ``kind``: a key or a value of :data:`KINDS`.
    """

    def __init__(self, kind: str | tuple[str, dict[str, Any]], place: tuple[str, torch.dtype], **change: Any) -> None:
        name, options = KINDS[kind] if isinstance(kind, str) else kind
        self.config = getattr(transformers, f"{name}Config")(**SIZES | options | change)
        self.model = getattr(transformers, f"{name}ForCausalLM")(self.config).eval().to(*place)
        self.reference = copy.deepcopy(self.model).float()
        self.reference.set_attn_implementation("eager")

    def logits(self, implementation: str, ids: torch.Tensor, cache: Any = None, **inputs: Any) -> torch.Tensor:
        self.model.set_attn_implementation(implementation)
        inputs |= {} if cache is None else {CACHE: cache}
        with torch.no_grad():
            return self.model(ids, **inputs).logits.float()

    def wanted(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            return self.reference(ids, attention_mask=mask, use_cache=False).logits

    def assert_near(self, got: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Check the logits of all real tokens, which are the last of ``ids`` if ``got`` has fewer."""
        tokens = slice(ids.shape[1] - got.shape[1], None)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        want = self.wanted(ids, mask)
        limit = LEAST[self.model.dtype] * want[real].norm()
        peer = (self.logits("eager", ids, attention_mask=mask, use_cache=False) - want)[real].norm()
        error = (got.float() - want[:, tokens])[real[:, tokens]].norm()
        assert error <= max(FACTOR * peer, limit), (error, peer, limit)


def tokens_of(batch: int, length: int, padding: str, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = torch.randint(1, VOCABULARY, (batch, length), device=device)
    if padding == "none":
        return ids, None
    mask = torch.ones_like(ids)
    for b in range(batch):
        if b % 2 == 0:
            mask[b, slice(0, 2 + b) if padding == "left" else slice(length - 2 - b, length)] = 0
    return ids, mask


def longer(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], count)], 1)
