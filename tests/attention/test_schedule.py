"""Plans of attention (include/flashinfer/attention/schedule.h): coverage, bounds and balance.

Every key of every tile is covered once, within the bounds that size the buffers. No CTA gets a second round
of items if longer items would fit into one round.
"""

from __future__ import annotations

import ctypes
import heapq
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
MIN_CHUNK, KV_STEP = 256, 64
SOURCE = """
#include <flashinfer/attention/schedule.h>
using namespace flashinfer;
extern "C" {
int whole_keys = 0;
int single_chunks(int qo_len, int kv_len, int ctas) {
  const int qo_indptr[] = {0, qo_len};
  PlanRequest request{1, qo_indptr, &kv_len, 1, 1, MaskMode::kNone, -1, 16, ctas, MIN_CHUNK, KV_STEP, true};
  request.whole_keys = whole_keys;
  return plan_single(request).num_chunks;
}
}
extern "C" int make(int batch, const int* qo_indptr, const int* kv_lens, int heads, int group, int causal, int window,
                    int tile_rows, int ctas, int split, int chunk, int item_keys, int capacity, int* items, int* merges,
                    int* counts) {
  const Plan made = plan({batch, qo_indptr, kv_lens, heads, group, causal ? MaskMode::kCausal : MaskMode::kNone, window,
                          tile_rows, ctas, MIN_CHUNK, KV_STEP, split != 0, chunk, item_keys,
                          item_keys / 2, whole_keys});
  counts[0] = made.items.size(), counts[1] = made.merges.size();
  counts[2] = made.num_slots, counts[3] = made.slot_rows;
  if (counts[0] > capacity || counts[1] > capacity) return 1;
  std::memcpy(items, made.items.data(), 32 * made.items.size());
  std::memcpy(merges, made.merges.data(), 32 * made.merges.size());
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "plan.cc").write_text(f"#include <cstring>\n{SOURCE}")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{ROOT / 'include'}",
               f"-DMIN_CHUNK={MIN_CHUNK}", f"-DKV_STEP={KV_STEP}", "plan.cc", "-o", "plan.so"]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "plan.so"))


def make(
    library: ctypes.CDLL, qo: list[int], kv: list[int], heads: int = 1, group: int = 1, causal: bool = False,
    window: int = -1, tile_rows: int = 16, ctas: int = 33, split: bool = True, chunk: int = 0,
    item_keys: int = 0,
) -> tuple[list[Any], list[Any], list[int]]:  # fmt: skip
    """Return items and merges as tuples of 8 numbers, and [items, merges, slots, slot_rows]."""
    tiles = sum(q * group // tile_rows + 1 for q in qo)
    capacity = tiles + ctas + 1 if chunk == 0 else tiles * (max(kv) // chunk + 2)
    starts = [sum(qo[:b]) for b in range(len(qo) + 1)]
    items, merges, counts = (ctypes.c_int * (8 * capacity))(), (ctypes.c_int * (8 * capacity))(), (ctypes.c_int * 4)()
    arrays = [(ctypes.c_int * max(len(x), 1))(*x) for x in (starts, kv)]
    failed = library.make(len(kv), *arrays, heads, group, causal, window, tile_rows, ctas, split, chunk, item_keys, capacity,
                          items, merges, counts)  # fmt: skip
    assert not failed, f"{list(counts)} items and merges, more than the capacity of {capacity}"
    return (
        [tuple(items[8 * i : 8 * i + 8]) for i in range(counts[0])],
        [tuple(merges[8 * i : 8 * i + 8]) for i in range(counts[1])],
        list(counts),
    )


LENGTHS = st.one_of(st.integers(0, 300), st.integers(0, 20000), st.just(5000))
REQUESTS = st.lists(st.tuples(st.one_of(st.just(1), st.integers(0, 200)), LENGTHS), max_size=40)


@settings(max_examples=300)
@given(
    requests=REQUESTS,
    heads=st.sampled_from([1, 2, 8, 64]),
    group=st.sampled_from([1, 4, 7]),
    causal=st.booleans(),
    window=st.sampled_from([-1, 0, 1000]),
    tile_rows=st.sampled_from([16, 128]),
    ctas=st.sampled_from([1, 2, 264]),
    split=st.booleans(),
    item_keys=st.sampled_from([0, 1, 500]),
)
def test_every_key_once_and_within_the_bounds(
    library, requests, heads, group, causal, window, tile_rows, ctas, split, item_keys
):
    qo, kv = [q for q, _ in requests], [k for _, k in requests]
    items, merges, counts = make(
        library, qo, kv, heads, group, causal, window, tile_rows, ctas, split, item_keys=item_keys
    )
    splits = defaultdict(list)
    for batch, qo_start, qo_len, kv_len, row, start, end, slot in items:
        assert (qo_start, qo_len, kv_len) == (sum(qo[:batch]), qo[batch], kv[batch])
        assert 0 <= start <= end <= kv_len
        splits[batch, row].append((start, end, slot))
    assert set(splits) == {(b, row) for b in range(len(qo)) for row in range(0, qo[b] * group, tile_rows)}
    slots_of = {(m[0], m[3]): range(m[4], m[4] + m[5]) for m in merges}
    for (batch, row), parts in splits.items():
        parts.sort()
        last_row = min(row + tile_rows, qo[batch] * group) - 1
        offset = kv[batch] - qo[batch]
        first = 0 if window < 0 else min(max(offset + row // group - window, 0), kv[batch])
        stop = min(max(offset + last_row // group + 1, 0), kv[batch]) if causal else kv[batch]
        assert (parts[0][0], parts[-1][1]) == (first, max(first, stop))
        assert all(before[1] == after[0] for before, after in pairwise(parts))
        slots = [slot for _, _, slot in parts]
        assert slots == (list(slots_of[batch, row]) if (batch, row) in slots_of else [-1])
    # The bounds that csrc/attention/operators.h uses to size the buffers of a captured graph.
    rows, max_splits = sum(qo) * group, ctas // heads + 1
    max_tiles = rows // tile_rows + len(qo)
    assert counts[0] <= max_tiles + max_splits and counts[1] <= min(max_tiles, max_splits)
    assert counts[2] <= 2 * max_splits and counts[3] <= tile_rows
    lengths = [item[6] - item[5] for item in items]
    assert lengths == sorted(lengths, reverse=True) or (item_keys > 0 and split)
    if item_keys > 0 and split and len(splits) <= 4 * max(1, ctas // heads):
        assert all(end - start >= MIN_CHUNK for parts in splits.values() if len(parts) > 1 for start, end, _ in parts)


def test_equal_tiles_go_last_rows_first(library):
    """The last rows see the most keys if a run has a causal mask and the plan had none."""
    items, _, _ = make(library, [160, 80], [1000, 1000], split=False)
    assert [(item[0], item[4]) for item in items] == [
        (b, row) for b, n in ((0, 160), (1, 80)) for row in range(n - 16, -1, -16)
    ]


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 5, 10, 16, 20, 33])
def test_equal_requests_are_one_round_of_about_equal_splits(library, requests):
    length, ctas = 131072, 33
    items, _, _ = make(library, [1] * requests, [length] * requests, ctas=ctas)
    longest = max(item[6] - item[5] for item in items)
    assert len(items) <= ctas
    assert longest <= -(-length // (ctas // requests)) + KV_STEP


def test_one_long_request_among_short_ones_is_split(library):
    lens = [65000] + [700] * 20
    items, merges, _ = make(library, [1] * 21, lens, ctas=33)
    assert len(merges) == 1
    assert max(item[6] - item[5] for item in items) < 2 * sum(lens) / 33


def test_short_requests_are_not_split(library):
    items, merges, counts = make(library, [1] * 4, [MIN_CHUNK] * 4, ctas=264)
    assert (len(items), merges, counts[2]) == (4, [], 0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_share_of_more_than_31_bits(library, causal):
    """A prefill of a million tokens for eight heads on 132 CTAs has long enough tiles without splits."""
    length, rows = 1 << 20, 128
    items, merges, counts = make(library, [length], [length], 8, 8, causal, tile_rows=rows, ctas=132 // 8)
    assert len(items) == length * 8 // rows + counts[2] - len(merges) and counts[2] <= 2 * 132


def costs_of_ctas(items: list[Any], ctas: int, item_keys: int) -> list[int]:
    """Return the cost of each CTA if every item starts on the CTA that is free first."""
    costs = [0] * ctas
    for item in items:
        heapq.heappush(costs, heapq.heappop(costs) + item[6] - item[5] + item_keys)
    return costs


# Two tiles of 64 rows per request, as of a model with 128 heads.
TWO_TILES: dict[str, Any] = {"group": 128, "tile_rows": 64, "ctas": 132}
PARETO = [1 + 40000 // rank for rank in range(1, 65)]


@pytest.mark.parametrize("lens", [PARETO, [4096] * 20, [4096] * 40, [4096] * 64, [32768], [9000] * 3 + [100] * 80],
                         ids=["pareto", "20", "40", "64", "one", "few long"])  # fmt: skip
def test_ctas_have_about_the_same_cost(library, lens):
    cost = 500
    items, _, _ = make(library, [1] * len(lens), lens, item_keys=cost, **TWO_TILES)
    costs = costs_of_ctas(items, TWO_TILES["ctas"], cost)
    assert max(costs) <= 1.1 * sum(costs) / len(costs) + 2 * KV_STEP


def test_both_tiles_of_a_request_run_at_one_time(library):
    """Both tiles then read the keys from gmem once."""
    items, _, _ = make(library, [1] * len(PARETO), PARETO, item_keys=500, **TWO_TILES)
    for first, second in zip(items[::2], items[1::2], strict=True):
        assert (first[0], first[5:7]) == (second[0], second[5:7])
        assert {first[4], second[4]} == {0, 64}


def test_no_split_below_the_cost_of_a_merge(library):
    """Splits would gain less time than a merge costs."""
    lens = [4096] * 64
    assert make(library, [1] * 64, lens, item_keys=500, **TWO_TILES)[1] == []
    assert make(library, [1] * 40, lens[:40], item_keys=500, **TWO_TILES)[1] != []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [-1, 300])
@pytest.mark.parametrize("chunk", [1, 100, 4096])
def test_fixed_splits_are_the_same_in_every_batch(chunk, window, causal, library):
    """Splits end at multiples of the chunk, for any other requests and any machine."""

    def splits(qo: list[int], kv: list[int], batch: int, ctas: int) -> set[tuple[int, int, int]]:
        items, merges, counts = make(library, qo, kv, 2, 4, causal, window, 64, ctas, chunk=chunk)
        assert counts[2] == sum(merge[5] for merge in merges) == sum(item[7] >= 0 for item in items)
        own = [item for item in items if item[0] == batch]
        for _, _, _, _, row, start, end, _ in own:
            limits = [other[5:7] for other in own if other[4] == row]
            assert end % chunk == 0 or end == max(last for _, last in limits)
            assert start // chunk == (end - 1) // chunk
        return {(row, start, end) for _, _, _, _, row, start, end, _ in own}

    single = splits([70], [1000], 0, 264)
    assert splits([1, 70, 200], [5000, 1000, 200], 1, 33) == single
    assert splits([70, *[1] * 50], [1000, *[900] * 50], 0, 8) == single


@pytest.mark.parametrize("item_keys", [0, 128])
def test_keys_that_one_cta_can_hold_are_not_split(library, item_keys):
    """A merge costs more than a split of few keys gains, even if other CTAs are idle."""
    whole_keys = ctypes.c_int.in_dll(library, "whole_keys")

    def splits(lens: list[int]) -> int:
        items, merges, _ = make(library, [1] * len(lens), lens, item_keys=item_keys)
        assert len(items) - len(lens) >= len(merges)
        return len(items) - len(lens)

    assert splits([700]) > 0 and library.single_chunks(1, 400, 33) > 1, (
        "whole_keys has no effect without splits of 400 keys"
    )
    whole_keys.value = 1024
    try:
        for lens in ([400], [1024], [1024, 3], [0], [700] * 5):
            assert splits(lens) == 0
        assert splits([5000]) > 0 and splits([5000, 400]) > 0
        assert library.single_chunks(1, 400, 33) == library.single_chunks(1, 1024, 33) == 1
        assert library.single_chunks(1, 5000, 33) > 1
    finally:
        whole_keys.value = 0
