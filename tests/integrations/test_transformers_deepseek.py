"""DeepSeek's models of transformers on our attention: latents in the cache, keys and values made of them for each call."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from ..support.transformers_models import LATENT, PADDINGS, Pair, longer, tokens_of


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3"])
def test_prefill_and_decoding(kind, padding, ours, device):
    """A prompt, then tokens one by one and three at once through a cache of latents, which is what models keep."""
    pair = Pair((kind, LATENT), (device, torch.bfloat16))
    ids, mask = tokens_of(3, 21, padding, device)
    cache = DynamicCache(config=pair.config)
    logits, start = [], 0
    for end in (14, 15, 16, 19, 21) if padding != "right" else (21,):
        part = None if mask is None else mask[:, :end]
        logits.append(pair.logits(ours, ids[:, start:end], attention_mask=part, cache=cache))
        start = end
    pair.assert_near(torch.cat(logits, 1), ids, mask)
    assert cache.layers[0].keys.shape == (3, 1, 21, LATENT["kv_lora_rank"])
    assert cache.layers[0].values.shape == (3, 1, 21, LATENT["qk_rope_head_dim"])


def test_generate(ours, device):
    pair = Pair(("DeepseekV3", LATENT), (device, torch.bfloat16))
    ids, mask = tokens_of(3, 11, "left", device)
    pair.model.set_attn_implementation(ours)
    made = pair.model.generate(
        ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    pair.assert_near(torch.stack(made.logits, 1), made.sequences[:, :-1], longer(mask, 4))
