"""Captured draws: each replay draws anew, and a seed repeats them."""

from __future__ import annotations

import pytest
import torch

from flashinfer import sampling

from ..support.sampling_oracle import rows_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DRAWS = {
    "plain": lambda x, **more: sampling.sampling_from_probs(x, **more),
    "top_p": lambda x, **more: sampling.top_p_sampling_from_probs(x, 0.9, **more),
    "logits": lambda x, **more: sampling.top_k_top_p_sampling_from_logits(x.log(), 50, 0.9, **more),
}


def captured(call):
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_the_default_generator_differ_between_replays_and_repeat_with_the_seed(name):
    x = rows_of("flat", 64, 5000).cuda()
    graph, out = captured(lambda: DRAWS[name](x))

    def replays() -> list[torch.Tensor]:
        samples = []
        for _ in range(4):
            out.fill_(-1)
            graph.replay()
            samples.append(out.clone())
        return samples

    torch.manual_seed(5)
    first = replays()
    assert all(((sample >= 0) & (sample < 5000)).all() for sample in first)
    assert all(not a.equal(b) for i, a in enumerate(first) for b in first[:i])
    torch.manual_seed(5)
    assert all(a.equal(b) for a, b in zip(first, replays(), strict=True))
    torch.manual_seed(6)
    assert not replays()[0].equal(first[0])


@pytest.mark.parametrize("name", DRAWS)
def test_seeds_that_are_advanced_in_the_graph(name):
    x = rows_of("flat", 64, 5000).cuda()
    seed, offset = torch.tensor([11], device="cuda"), torch.tensor([0], device="cuda")

    def step() -> torch.Tensor:
        out = DRAWS[name](x, seed=seed, offset=offset)
        offset.add_(1)
        return out

    graph, out = captured(step)
    for at in (0, 7):
        offset.fill_(at)
        for now in range(at, at + 3):
            graph.replay()
            assert out.equal(DRAWS[name](x, seed=11, offset=now))
