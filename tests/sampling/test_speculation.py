"""chain_speculative_sampling: accepted tokens, drawn tokens, and their distribution."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

from ..support.sampling_oracle import Filters, is_sample, rows_of, uniform

SEED, OFFSET = 77, 5


def inputs(batch_size: int, num_draft: int, vocab_size: int, device: str):
    draft = rows_of("normal", batch_size * num_draft, vocab_size).view(batch_size, num_draft, vocab_size)
    target = rows_of("normal", batch_size * (num_draft + 1), vocab_size).view(batch_size, num_draft + 1, vocab_size)
    ids = torch.randint(vocab_size, (batch_size, num_draft))
    return draft.to(device), ids.to(device), target.to(device)


@pytest.mark.parametrize("vocab_size", [2, 111, 5000])
@pytest.mark.parametrize("num_draft", [1, 3, 40])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_against_the_definition(vocab_size, num_draft, wide, device):
    draft, ids, target = inputs(7, num_draft, vocab_size, device)
    ids[3, 0], ids[4, -1] = vocab_size, -1  # invalid tokens are not accepted
    accepted, emitted = (torch.full((7,), 10, dtype=wide, device=device) for _ in range(2))
    tokens, a, e = sampling.chain_speculative_sampling(
        draft, ids.to(wide), target, accepted, emitted, seed=SEED, offset=OFFSET
    )
    assert a is accepted and e is emitted and tokens.dtype == torch.int32
    for row in range(7):
        passes = []
        for j, token in enumerate(ids[row].tolist()):
            u = uniform(SEED, OFFSET, row, 1 + j)
            inside = 0 <= token < vocab_size
            passes.append(inside and u * float(draft[row, j, token]) < float(target[row, j, token]))
        count = passes.index(False) if False in passes else num_draft
        got = tokens[row].tolist()
        assert (int(a[row]), int(e[row])) == (10 + sum(passes), 10 + count)
        assert got[:count] == ids[row, :count].tolist() and got[count + 1 :] == [-1] * (num_draft - count)
        rest = target[row, count].double().cpu()
        if count < num_draft:
            left = (target[row, count].cpu() - draft[row, count].cpu()).clamp(min=0)
            rest = left if left.sum() > 0 else rest
        assert is_sample(rest, uniform(SEED, OFFSET, row, 0), got[count], Filters(), 1e-6)


def test_equal_rows_and_certain_rows(device):
    draft, ids, target = inputs(16, 4, 300, device)
    target[:, :4] = draft  # u * p < p: all are accepted
    tokens, accepted, emitted = sampling.chain_speculative_sampling(draft, ids, target)
    assert accepted.eq(4).all() and emitted.eq(4).all() and tokens[:, :4].equal(ids.int())
    target[:, 0] = 0
    target[torch.arange(16), 0, 7] = 1
    ids[:, 0] = 8
    tokens, _, emitted = sampling.chain_speculative_sampling(draft, ids, target)
    assert emitted.eq(0).all() and tokens[:, 0].eq(7).all() and tokens[:, 1:].eq(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_strided_half_types(dtype, device):
    draft, ids, target = (x for x in inputs(5, 3, 513, device))
    wide = torch.zeros(5, 8, 600, dtype=dtype, device=device)
    wide[:, :3, 5:518], wide[:, 4:8, 5:518] = draft.to(dtype), target.to(dtype)
    views = wide[:, :3, 5:518], wide[:, 4:8, 5:518]
    strided = sampling.chain_speculative_sampling(views[0], ids, views[1], seed=1, offset=2)
    dense = sampling.chain_speculative_sampling(*(views[0].clone(), ids, views[1].clone()), seed=1, offset=2)
    assert all(a.equal(b) for a, b in zip(strided, dense, strict=True))


def test_tokens_are_distributed_as_the_target(device):
    """Compute chi-square over the tokens of each position; fixed seeds exclude failures by chance."""
    n, chains, vocab_size = 2, 200_000, 7
    generator = torch.Generator().manual_seed(0)
    draft = torch.rand(n, vocab_size, generator=generator).softmax(-1)
    target = (3 * torch.rand(n + 1, vocab_size, generator=generator)).softmax(-1)
    draft_rows = draft.expand(chains, n, vocab_size).contiguous()
    ids = torch.stack([row.multinomial(chains, replacement=True, generator=generator) for row in draft], dim=1)
    tokens, _, _ = sampling.chain_speculative_sampling(
        draft_rows.to(device),
        ids.to(device),
        target.expand(chains, n + 1, vocab_size).contiguous().to(device),
        seed=1,
        offset=0,
    )
    for position in range(n + 1):
        there = tokens[:, position][tokens[:, position] >= 0].cpu().long()
        counts = torch.bincount(there, minlength=vocab_size).double()
        want = target[position].double() * len(there)
        chi_square = ((counts - want) ** 2 / want).sum()
        assert chi_square < 38.3, (position, counts, want)  # p = 1e-6 for 6 degrees of freedom


def test_errors():
    draft, ids, target = inputs(2, 3, 16, "cpu")
    call = sampling.chain_speculative_sampling
    zeros = torch.zeros(2, dtype=torch.int32)
    for error, args, text in (
        (ValueError, (draft[0], ids, target), "draft_probs"),
        (ValueError, (draft, ids[:, :2], target), "draft_token_ids"),
        (ValueError, (draft, ids, target[:, :3]), "target_probs"),
        (TypeError, (draft, ids.float(), target), "draft_token_ids"),
        (TypeError, (draft, ids, target.half()), "target_probs"),
        (TypeError, (draft, ids, target, zeros.float()), "maybe_output_accepted_token_num"),
        (ValueError, (draft, ids, target, zeros, zeros), "overlaps"),
        (ValueError, (draft, ids, target, zeros[:1]), "maybe_output_accepted_token_num"),
    ):
        with pytest.raises(error, match=text):
            call(*args)
