"""Verification of the tokens of a draft."""

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
    """Verify the tokens of a draft (Leviathan et al. 2022): what comes out is distributed as ``target_probs``.

    Position ``j`` accepts its token ``d`` where ``u_j * draft_probs[j, d] < target_probs[j, d]``. The first that does not is replaced by a
    token drawn from ``relu(target_probs - draft_probs)``; where all do, one more is drawn from the last row of ``target_probs``.

    Args:
        draft_probs: ``[batch_size, num_draft, vocab_size]``.
        draft_token_ids: ``[batch_size, num_draft]`` int32 or int64; what is outside of the vocabulary is not accepted.
        target_probs: ``[batch_size, num_draft + 1, vocab_size]``.
        maybe_output_accepted_token_num: ``[batch_size]`` int32 or int64, to which the number of positions is added that accept,
            those behind the first that does not among them.
        maybe_output_emitted_draft_token_num: the same for the number of tokens of the draft that come out.
        generator, seed, offset, slot: see the module's description.

    Returns:
        ``(tokens, accepted, emitted)``: ``[batch_size, num_draft + 1]`` int32, -1 behind the last token, and the two counts.
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
