"""Operators of the sampling family."""

from __future__ import annotations

from typing import Any

import torch

from .._ops.declare import define
from .._ops.route import without_gradient
from ..jit.modules.sampling import gen_sampling_module

_RANDOM = "Tensor? seed, SymInt seed_value, Tensor? offset, SymInt offset_value, Tensor? slot, SymInt slot_value"


def _fake_samples(input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    indices = args[10]
    if indices is None:
        samples = input.new_empty(input.shape[:1], dtype=torch.int32)
    else:
        samples = indices.new_empty(indices.shape)
    return samples, samples.new_empty(samples.shape, dtype=torch.bool)


def _fake_like(input: torch.Tensor, *_: Any) -> torch.Tensor:
    return input.new_empty(input.shape)


def _fake_tokens(draft_probs: torch.Tensor, draft_token_ids: torch.Tensor, *_: Any) -> torch.Tensor:
    batch_size, num_draft = draft_token_ids.shape
    return draft_token_ids.new_empty((batch_size, num_draft + 1), dtype=torch.int32)


def _fake_top_k(input: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (input.shape[0], k)
    return input.new_empty(shape), input.new_empty(shape, dtype=torch.int64)


sample_from_rows = define(
    "sample_from_rows(Tensor input, bool is_logits, Tensor? temperature, float temperature_value, Tensor? top_k,"
    " SymInt top_k_value, Tensor? top_p, float top_p_value, Tensor? min_p, float min_p_value, bool top_k_first,"
    f" Tensor? indices, {_RANDOM}) -> (Tensor, Tensor)",
    gen_sampling_module,
    _fake_samples,
)
softmax = define(
    "softmax(Tensor logits, Tensor? temperature, float temperature_value, bool? enable_pdl) -> Tensor",
    gen_sampling_module,
    lambda logits, *_: logits.new_empty(logits.shape, dtype=torch.float32),
    fallback=without_gradient("softmax", "logits"),
)
top_k_renorm_probs = define(
    "top_k_renorm_probs(Tensor probs, Tensor? top_k, SymInt top_k_value) -> Tensor",
    gen_sampling_module,
    _fake_like,
    fallback=without_gradient("top_k_renorm_probs", "probs"),
)
top_p_renorm_probs = define(
    "top_p_renorm_probs(Tensor probs, Tensor? top_p, float top_p_value) -> Tensor",
    gen_sampling_module,
    _fake_like,
    fallback=without_gradient("top_p_renorm_probs", "probs"),
)
top_k_mask_logits = define(
    "top_k_mask_logits(Tensor logits, Tensor? top_k, SymInt top_k_value) -> Tensor",
    gen_sampling_module,
    _fake_like,
    fallback=without_gradient("top_k_mask_logits", "logits"),
)
chain_speculative_sampling = define(
    "chain_speculative_sampling(Tensor draft_probs, Tensor draft_token_ids, Tensor target_probs, Tensor(a!) accepted,"
    f" Tensor(b!) emitted, {_RANDOM}) -> Tensor",
    gen_sampling_module,
    _fake_tokens,
)
top_k = define(
    "top_k(Tensor input, SymInt k) -> (Tensor, Tensor)",
    gen_sampling_module,
    _fake_top_k,
    fallback=without_gradient("top_k", "input"),
)
