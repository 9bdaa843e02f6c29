"""Verification of draft tokens."""

from __future__ import annotations

import torch

from . import operators
from .parameters import check_rows
from .random import Word, random_of


def chain_speculative_sampling(
    draft_probs: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    maybe_output_accepted_token_num: torch.Tensor | None = None,
    maybe_output_emitted_draft_token_num: torch.Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Word = None,
    offset: Word = None,
    slot: Word = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Verify draft tokens (Leviathan et al. 2022). The result is distributed as ``target_probs``.

    Position ``j`` accepts its token ``d`` if ``u_j * draft_probs[j, d] < target_probs[j, d]``. The first
    rejected token is replaced by one drawn from ``relu(target_probs - draft_probs)``. If all are accepted,
    one more is drawn from the last row of ``target_probs``.

    Args:
        draft_probs: ``[batch_size, num_draft, vocab_size]``.
        draft_token_ids: ``[batch_size, num_draft]`` int32 or int64; tokens outside of the vocabulary are
            rejected.
        target_probs: ``[batch_size, num_draft + 1, vocab_size]``.
        maybe_output_accepted_token_num: ``[batch_size]`` int32 or int64. The number of positions that accept
            is added to it, including those after the first rejected one.
        maybe_output_emitted_draft_token_num: the same for the number of emitted draft tokens.
        generator, seed, offset, slot: see the module's description.

    Returns:
        ``(tokens, accepted, emitted)``: ``[batch_size, num_draft + 1]`` int32, -1 after the last token, and
        the two counts.
    """
    check_rows("chain_speculative_sampling", "draft_probs", draft_probs, 3)
    batch_size, device = draft_probs.shape[0], draft_probs.device

    def counts(given: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(batch_size, dtype=torch.int32, device=device) if given is None else given

    accepted = counts(maybe_output_accepted_token_num)
    emitted = counts(maybe_output_emitted_draft_token_num)
    random = random_of("chain_speculative_sampling", device, batch_size, generator, seed, offset, slot)
    tokens = operators.chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, accepted, emitted, *random
    )
    return tokens, accepted, emitted
