"""Kernels of attention's gradients against the composition in float64, with inputs of no forward pass."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import pytest
import torch

import flashinfer
from flashinfer._attention import reference as composition

from ..conftest import DEVICES
from ..support.attention_oracle import drawn, int32
from .test_prefill_backward import assert_close

PLACES = [(device, dtype) for device in DEVICES for dtype in (torch.float16, torch.bfloat16)]
place = pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1]}".replace("torch.", ""))
SIZES = [(8, 8), (64, 64), (72, 24), (24, 72), (128, 128), (192, 128), (136, 120), (208, 256), (256, 8)]


class Case(NamedTuple):
    """Arguments of the operator, and its results in float64 with tokens first for any layout."""

    arguments: list[Any]
    want: tuple[torch.Tensor, ...]

    def run(self) -> tuple[torch.Tensor, ...]:
        return torch.ops.flashinfer.prefill_backward(*self.arguments)


def padded(x: torch.Tensor, used: list[tuple[int, int]], device: str) -> torch.Tensor:
    """Return ``x`` on the device inside larger rows, with NaN in rows of no request."""
    *rows, size = x.shape
    padded = torch.full((*rows, size + 8), math.nan, dtype=x.dtype, device=device)
    for start, stop in used:
        padded[start:stop, :, :size] = x[start:stop].to(device)
    return padded[..., :size]


def case(
    place: tuple[str, torch.dtype], sizes: tuple[int, int], heads: tuple[int, int], lengths: list[tuple[int, int]],
    layout: int = 0, mask_mode: int = 0, window_left: int = -1, cap: float = 0.0, alibi: bool = False, scale: float = 0.2,
) -> Case:  # fmt: skip
    """Return a case. Two queries before the first request and three tokens after the last belong to none."""
    (device, dtype), (qk, vo) = place, sizes
    starts = [2, *itertools.accumulate((qo for qo, _ in lengths), initial=2)][1:]
    tokens, keys = starts[-1] + 3, sum(kv for _, kv in lengths)
    shapes = (tokens, heads[0], qk), (keys + 3, heads[1], qk), (keys + 3, heads[1], vo), (tokens, heads[0], vo)
    q, k, v, grad = (drawn(shape, dtype, "cpu") for shape in shapes)
    qo_indptr, kv_lens = int32(starts), int32([kv for _, kv in lengths])
    mask = None
    if mask_mode == 2:
        bits = [torch.rand(qo * kv) < 0.6 for qo, kv in lengths]
        mask = torch.cat([flashinfer.packbits(one, bitorder="little") for one in bits])
    slopes = torch.rand(heads[0]) if alibi else None
    call = composition.CallOptions(0, mask_mode, window_left, 2 if alibi else 0, cap, scale, 1.0, 1e4)
    requests = composition.requests_of(q, k, 0, qo_indptr, kv_lens)
    wide = [x.double() for x in (q, k, v, grad)]
    out, lse = composition.attend(*wide[:3], requests, call, mask, slopes)
    out, grad_lse = out.to(dtype), 0.1 * torch.randn(lse.shape) * lse.isfinite()
    delta = (out.double() * wide[3]).sum(-1) - composition.LOG2E * grad_lse
    want = composition.gradients(*wide, delta, lse, requests, call, mask, slopes)
    of_q, of_k = [(2, starts[-1])], [(0, keys)]
    given = [padded(x, of, device) for x, of in ((q, of_q), (k, of_k), (v, of_k), (out, of_q), (grad, of_q))]
    if layout:
        given[1:3] = (x.transpose(0, 1).contiguous() for x in given[1:3])
    on_device = [None if x is None else x.to(device) for x in (mask, slopes)]
    rows = [x.float().to(device) for x in (lse, grad_lse)]
    return Case(
        [
            *given[:4],
            rows[0],
            given[4],
            rows[1],
            qo_indptr,
            kv_lens,
            *on_device,
            layout,
            mask_mode,
            window_left,
            cap,
            scale,
        ],
        tuple(want),
    )


def check(one: Case, layout: int = 0) -> None:
    got = one.run()
    if layout:
        got = (got[0], *(x.transpose(0, 1) for x in got[1:]))
    assert_close([x.detach() for x in got], list(one.want))
    keys = one.want[1].shape[0] - 3
    nobody = [got[0][:2], got[0][-3:], got[1][keys:], got[2][keys:]]
    assert all(bool((x == 0).all()) for x in nobody)
    assert all(torch.equal(a, b) for a, b in zip(one.run(), one.run(), strict=True))


@place
@pytest.mark.parametrize("mask_mode", [0, 1, 2], ids=["all", "causal", "mask"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_of_heads(sizes, mask_mode, place):
    lengths = [(random.randint(1, 150), random.randint(1, 300)) for _ in range(3)] + [(0, 7), (9, 0), (130, 1)]
    random.shuffle(lengths)
    check(case(place, sizes, (4, 2), lengths, mask_mode=mask_mode))


@place
@pytest.mark.parametrize(
    "given",
    [
        dict(window_left=0),
        dict(window_left=70, mask_mode=1),
        dict(window_left=2**31 - 1),
        dict(window_left=90, mask_mode=2),
        dict(cap=2.0, mask_mode=1),
        dict(alibi=True),
        dict(alibi=True, cap=3.0, mask_mode=1, window_left=33),
        dict(scale=-0.2),
        dict(scale=0.0, mask_mode=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_options(sizes, given, place):
    check(case(place, sizes, (6, 2), [(131, 200), (70, 20), (1, 333), (257, 257)], **given))


@place
@pytest.mark.parametrize("sizes", [(64, 64), (192, 128)], ids=str)
def test_layouts(sizes, place):
    for lengths in ([(33, 70), (5, 150)], [(130, 200), (128, 90)]):
        check(case(place, sizes, (4, 2), lengths, layout=1, mask_mode=1), layout=1)


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """Return the same values, with heads outermost in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@place
@pytest.mark.parametrize("sizes", [(64, 64), (72, 24), (128, 128)], ids=str)
def test_strides(sizes, place):
    """Tensors with heads before tokens in memory, or one row for all tokens, give the same bits."""
    one = case(place, sizes, (4, 2), [(150, 170), (128, 200)], mask_mode=1)
    want = one.run()
    for number in (0, 1, 2, 3, 5):
        turned = [by_heads(x) if i == number else x for i, x in enumerate(one.arguments)]
        got = one._replace(arguments=turned).run()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    expanded, dense = [*one.arguments], [*one.arguments]
    expanded[5] = one.arguments[5][2:3].expand(one.arguments[5].shape)
    dense[5] = expanded[5].contiguous()
    got, want = (one._replace(arguments=arguments).run() for arguments in (expanded, dense))
    assert_close(list(got), [x.double() for x in want])


@pytest.mark.parametrize("name, number", [("k", 1), ("out", 3), ("grad", 5)])
def test_rows_whose_elements_are_apart_are_refused(name, number, device):
    one = case((device, torch.float16), (64, 64), (4, 2), [(150, 170)])
    x = one.arguments[number]
    one.arguments[number] = x.transpose(1, 2).contiguous().transpose(1, 2)
    message = rf"ValueError: prefill_backward: {name}: got stride \d+ of the last dimension, wanted 1"
    with pytest.raises(RuntimeError, match=message):
        one.run()


@place
def test_many_requests(place):
    """More requests than a launch takes."""
    check(case(place, (64, 64), (2, 1), [(random.randint(0, 20), random.randint(0, 20)) for _ in range(150)]))


@place
@pytest.mark.parametrize("mask_mode", [0, 1], ids=["all", "causal"])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_few_keys_and_many_queries(sizes, mask_mode, place):
    """Few keys, so that several CTAs of a GPU share the keys of a tile."""
    check(case(place, sizes, (8, 1), [(random.randint(1000, 1500), random.randint(200, 500))], mask_mode=mask_mode))


@place
@pytest.mark.parametrize("mask_mode", [0, 1], ids=["all", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_whole_and_broken_tiles(dim, mask_mode, place):
    """Lengths at and next to those of tiles, more and fewer keys than queries, queries that see no key."""
    lengths = [(64, 128), (128, 128), (63, 127), (65, 129), (192, 600), (300, 100), (127, 1), (1, 257), (256, 256)]
    random.shuffle(lengths)
    check(case(place, (dim, dim), (4, 2), lengths, mask_mode=mask_mode))


@place
def test_many_long_requests(place):
    """More requests than a launch takes, with half a tile of queries and more for Hopper's kernels."""
    check(
        case(
            place,
            (64, 64),
            (2, 1),
            [(random.randint(100, 200), random.randint(1, 200)) for _ in range(70)],
            mask_mode=1,
        )
    )


@place
@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (12, 2)], ids=str)
def test_groups_of_heads(heads, place):
    """Groups whose heads are shared by several CTAs or belong to one, in a causal batch."""
    check(case(place, (128, 128), heads, [(500, 700), (130, 130)], mask_mode=1))


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_in_a_graph():
    one = case(("cuda", torch.float16), (128, 128), (4, 1), [(300, 400), (70, 500)], mask_mode=1)
    check(one)
    other = case(("cuda", torch.float16), (128, 128), (4, 1), [(300, 400), (70, 500)], mask_mode=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = one.run()
    for mine, new in zip(one.arguments[:7], other.arguments[:7], strict=True):
        mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, other.run(), strict=True))
