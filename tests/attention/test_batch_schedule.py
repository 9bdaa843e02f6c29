"""Schedules that the device makes from tensors of lengths: coverage, bounds, balance, and any number of threads."""

from __future__ import annotations

import ctypes
import heapq
import random
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import flashinfer._attention.batch_schedule as module
from flashinfer._attention.lists import Shape
from tests.support.attention_oracle import int32

ROOT = Path(__file__).resolve().parents[2]
STEP, SHORTEST, ITEM_KEYS, WHOLE_KEYS = 128, 256, 128, 448


class Sizes(NamedTuple):
    q_len: int = 1
    group: int = 4
    heads: int = 2
    tile_rows: int = 16
    workers: int = 33
    most_keys: int = 1 << 20
    table_stride: int = 77
    causal: int = 1
    window_left: int = -1


class Schedule(NamedTuple):
    items: list[list[int]]
    merges: list[list[int]]
    plan: torch.Tensor
    kv_indptr: torch.Tensor
    qo_lens: list[int]
    kv_lens: list[int]


def schedule_layout(sizes: Sizes, batch: int) -> module.ScheduleLayout:
    shape = Shape(sizes.heads * sizes.group, sizes.heads, 64, 64, *[torch.float16] * 3)
    return module.schedule_layout_of(shape, batch, sizes.q_len, sizes.tile_rows, sizes.workers)


def schedule(lens: torch.Tensor, sizes: Sizes, qo_indptr: torch.Tensor | None = None, tokens: int = -1) -> Schedule:
    """Make a schedule in poisoned memory and parse it."""
    batch = lens.numel()
    at = schedule_layout(sizes, batch)
    plan = torch.full((at.lists,), -7, dtype=torch.int32, device=lens.device)
    kv_indptr = torch.full((batch + 1,), -7, dtype=torch.int32, device=lens.device)
    module.schedule_batch(
        plan, kv_indptr, None, lens, qo_indptr, None, batch * sizes.q_len if tokens < 0 else tokens, sizes.q_len,
        sizes.most_keys, sizes.table_stride, sizes.heads, sizes.group, sizes.tile_rows, sizes.causal,
        sizes.window_left, sizes.workers,
    )  # fmt: skip
    return parse(plan.cpu(), kv_indptr.cpu(), at, batch)


def parse(plan: torch.Tensor, kv_indptr: torch.Tensor, at: module.ScheduleLayout, batch: int) -> Schedule:
    merges_at = -(-(16 + 2 * batch) // 8) * 8
    items_at = merges_at + 8 * at.max_merges
    num_items, num_merges = plan[:2].tolist()
    assert num_items <= at.max_items and num_merges <= at.max_merges
    items = plan[items_at : items_at + 8 * num_items].view(-1, 8).tolist()
    merges = plan[merges_at : merges_at + 8 * num_merges].view(-1, 8)[:, :6].tolist()
    return Schedule(
        items, merges, plan, kv_indptr, plan[16 : 16 + batch].tolist(), plan[16 + batch : 16 + 2 * batch].tolist()
    )


def extent(sizes: Sizes, qo_len: int, kv_len: int, row: int) -> tuple[int, int]:
    """Return the keys that a tile's rows see."""
    first, last = row // sizes.group, (min(row + sizes.tile_rows, qo_len * sizes.group) - 1) // sizes.group
    window = kv_len + qo_len if sizes.window_left < 0 else sizes.window_left
    begin = min(max(kv_len - qo_len + first - window, 0), kv_len)
    end = min(max(kv_len - qo_len + last + 1, 0), kv_len) if sizes.causal else kv_len
    return begin, max(begin, end)


def check(result: Schedule, sizes: Sizes, lens: list[int], queries: list[tuple[int, int]]) -> None:
    """Check that every tile's keys are covered once, by items whose slots are merged in order."""
    batch = len(lens)
    assert result.kv_lens == lens and result.qo_lens == [length for _, length in queries]
    assert result.kv_indptr.tolist() == [b * sizes.table_stride for b in range(batch + 1)]
    of_tile = defaultdict(list)
    for b, start, length, kv_len, row, begin, end, slot in result.items:
        assert (start, length, kv_len) == (*queries[b], lens[b])
        of_tile[b, row].append((begin, end, slot))
    tiles = [(b, row) for b in range(batch) for row in range(0, queries[b][1] * sizes.group, sizes.tile_rows)]
    assert sorted(of_tile) == tiles
    merged, slots = {}, 0
    for b, start, length, row, first, count in result.merges:
        assert (start, length) == queries[b] and count > 1 and first == slots
        merged[b, row], slots = (first, count), slots + count
    assert slots <= schedule_layout(sizes, batch).max_slots
    for b, row in tiles:
        pieces = sorted(of_tile[b, row])
        begin, end = extent(sizes, queries[b][1], lens[b], row)
        assert (pieces[0][0], pieces[-1][1]) == (begin, end)
        assert all(left[1] == right[0] for left, right in pairwise(pieces))
        if len(pieces) == 1:
            assert pieces[0][2] == -1 and (b, row) not in merged
        else:
            first, count = merged[b, row]
            assert [slot for *_, slot in pieces] == list(range(first, first + count))
            assert all((right[0] - begin) % STEP == 0 for right in pieces[1:])
    assert len(merged) == sum(len(pieces) > 1 for pieces in of_tile.values())
    at = schedule_layout(sizes, batch)
    tickets = result.plan[at.lists - at.max_merges * sizes.heads :]
    assert not tickets[: len(result.merges) * sizes.heads].any()


def makespan(result: Schedule, workers: int) -> int:
    """Return the cost of the busiest worker if each takes the next item when it is done."""
    used = [0] * workers
    for *_, begin, end, _ in result.items:
        heapq.heapreplace(used, used[0] + end - begin + ITEM_KEYS)
    return max(used)


def is_ordered(result: Schedule) -> bool:
    """Return whether no item is much longer than the one before it."""
    lengths = [end - begin for *_, begin, end, _ in result.items]
    step = max(lengths) // 16 + 1
    return all(later <= earlier + step for earlier, later in pairwise(lengths))


def drawn_lens(batch: int) -> list[int]:
    kind = random.randrange(4)
    if kind == 0:
        return [random.choice([100, 449, 4096, 30000])] * batch
    if kind == 1:
        return [int(200 * random.paretovariate(1.1)) % 50000 for _ in range(batch)]
    if kind == 2:
        return [random.choice([0, 1, 2, 448, 449, 511, 512, 70000]) for _ in range(batch)]
    return [random.randrange(5000) for _ in range(batch)]


@pytest.mark.parametrize("batch", [1, 2, 7, 33, 40, 130, 700])
def test_every_key_is_covered_once(batch, device):
    for _ in range(6):
        q_len = random.choice([1, 1, 3, 9])
        sizes = Sizes(
            q_len, random.choice([1, 4, 7]), tile_rows=random.choice([16, 64]), workers=random.choice([1, 5, 33, 132]),
            causal=random.randrange(2), window_left=random.choice([-1, -1, 0, 600, 5000]),
        )  # fmt: skip
        lens = drawn_lens(batch)
        result = schedule(int32(lens, device), sizes)
        check(result, sizes, lens, [(b * q_len, q_len) for b in range(batch)])


@pytest.mark.parametrize("batch", [1, 9, 60])
def test_requests_of_different_queries(batch, device):
    for _ in range(4):
        sizes = Sizes(q_len=9, group=5, workers=20)
        counts = [random.randrange(10) for _ in range(batch)]
        starts = [sum(counts[:b]) for b in range(batch + 1)]
        lens = drawn_lens(batch)
        result = schedule(int32(lens, device), sizes, int32(starts, device), starts[-1])
        check(result, sizes, lens, list(zip(starts, counts, strict=False)))


def test_lengths_beyond_their_bounds_count_as_the_bound(device):
    sizes = Sizes(most_keys=1000)
    result = schedule(int32([-5, 0, 1000, 1001, 2**31 - 1, -(2**31)], device), sizes)
    check(result, sizes, [0, 0, 1000, 1000, 1000, 0], [(b, 1) for b in range(6)])


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_sums_of_lengths_beyond_32_bits(batch, device):
    for _ in range(4):
        sizes = Sizes(most_keys=2**31 - 1, workers=random.choice([2, 33, 132]))
        lens = [random.choice([2**30, 2**30 - random.randrange(1000), 5, 2**29]) for _ in range(batch)]
        check(schedule(int32(lens, device), sizes), sizes, lens, [(b, 1) for b in range(batch)])


def test_offsets_beyond_their_bounds_stay_inside_of_the_queries(device):
    """Offsets of padding rows may be anything: no item reads or writes outside of the queries, or overfills lists."""
    sizes, batch = Sizes(q_len=4), 5
    for starts in ([0, 3, 2, 100, -4, 6], [9, 9, 9, 9, 9, 9], [0, 100, 0, 100, 0, 100]):
        result = schedule(int32([50] * batch, device), sizes, int32(starts, device), 8)
        for _, start, length, *_ in result.items:
            assert start >= 0 and 0 < length <= 4 and start + length <= 8


@pytest.mark.parametrize("workers", [16, 33, 66, 132])
def test_work_is_balanced(workers, device):
    """The busiest worker has at most twice the mean, or twice what no cut could avoid.

    Workers that take the next item when they are done have at most the mean and the longest item. Over 200,000
    draws the largest share of this bound was 0.75.
    """
    for _ in range(12):
        batch = random.choice([1, 2, 5, 16, 17, 31, 33, 40, 64, 128])
        sizes, lens = Sizes(workers=workers), drawn_lens(batch)
        result = schedule(int32(lens, device), sizes)
        cost = sum(lens) + ITEM_KEYS * len(result.items)
        least = max(cost / workers, min(max(lens), WHOLE_KEYS) + ITEM_KEYS, 2 * SHORTEST + ITEM_KEYS)
        assert makespan(result, workers) <= 2 * least + 2 * SHORTEST, (batch, lens)


def test_equal_lengths_fill_one_round(device):
    """16 requests on 33 workers have two splits each: three would wait for a second round."""
    result = schedule(int32([4096] * 16, device), Sizes())
    assert len(result.items) == 32 and len(result.merges) == 16


def test_many_equal_requests_are_not_split(device):
    assert not schedule(int32([4096] * 64, device), Sizes(workers=32)).merges
    assert not schedule(int32([4096] * 600, device), Sizes()).merges


def test_longest_items_come_first(device):
    result = schedule(int32([random.randrange(1, 400) for _ in range(300)], device), Sizes())
    assert is_ordered(result)


THREADS = """
#include <flashinfer/attention/batch_schedule.h>
#include <pthread.h>
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>
using namespace flashinfer;
using batch_schedule::Sums;

constexpr int kThreads = 64, kLanes = 32;

struct Shared {
  pthread_barrier_t barrier;
  batch_schedule::Memory memory;
  Sums sums[kThreads];
  int32_t numbers[kThreads], lengths[kThreads];
};

// The block of kThreads threads, in warps of kLanes.
struct Threads {
  batch_schedule::Memory& memory;
  Shared& shared;
  int32_t number;

  int32_t thread() const { return number; }
  int32_t threads() const { return kThreads; }
  int32_t log_threads() const { return 6; }
  int32_t lane() const { return number % kLanes; }
  int32_t lanes() const { return kLanes; }
  void sync() const { pthread_barrier_wait(&shared.barrier); }
  Sums before(int32_t, Sums own, Sums& all) const {
    sync();
    shared.sums[number] = own;
    sync();
    Sums earlier{0, 0};
    all = {0, 0};
    for (int i = 0; i < kThreads; ++i) {
      if (i == number) earlier = all;
      all.a += shared.sums[i].a, all.b += shared.sums[i].b;
    }
    return earlier;
  }
  int32_t share(int32_t own) const {
    sync();
    shared.numbers[number] = own;
    sync();
    return 0;
  }
  void put_length(int32_t own) const { shared.lengths[number] = own; }
  int32_t longest() const { return *std::max_element(shared.lengths, shared.lengths + kThreads); }
  int32_t sum_of_lanes(int32_t own) const {
    share(own);
    int32_t sum = 0;
    for (int i = number - lane(); i < number - lane() + kLanes; ++i) sum += shared.numbers[i];
    sync();
    return sum;
  }
  int32_t add(int32_t& to, int32_t by) const { return __atomic_fetch_add(&to, by, __ATOMIC_RELAXED); }
  int32_t first_at_most(const int32_t* numbers, int32_t bound) const {
    return batch_schedule::OneThread{memory}.first_at_most(numbers, bound);
  }
  void end_bins() const {
    sync();
    if (number == 0) batch_schedule::OneThread{memory}.end_bins();
    sync();
  }
};

extern "C" void make(const int32_t* lens, int batch, const int* sizes, int32_t* plan, int merges_at, int items_at,
                     int tickets_at, int32_t* kv_indptr) {
  BatchScheduleParams p{};
  p.seq_lens = lens, p.batch_size = batch, p.q_len = sizes[0], p.num_tokens = batch * sizes[0], p.group = FastDiv(sizes[1]);
  p.num_kv_heads = sizes[2], p.tile_rows = sizes[3], p.workers = FastDiv(sizes[4]), p.most_keys = sizes[5];
  p.table_stride = sizes[6], p.mask_mode = sizes[7] ? MaskMode::kCausal : MaskMode::kNone, p.window_left = sizes[8];
  p.counts = plan, p.qo_lens = plan + 16, p.kv_lens = plan + 16 + batch, p.kv_indptr = kv_indptr;
  p.merges = reinterpret_cast<MergeItem*>(plan + merges_at), p.items = reinterpret_cast<WorkItem*>(plan + items_at);
  p.tickets = reinterpret_cast<uint32_t*>(plan + tickets_at);
  Shared shared;
  pthread_barrier_init(&shared.barrier, nullptr, kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] { batch_schedule::make(p, Threads{shared.memory, shared, i}); });
  for (auto& thread : threads) thread.join();
}
"""


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    source, library = folder / "threads.cc", folder / "threads.so"
    source.write_text(THREADS)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", f"-I{ROOT}/include", source, "-o", library]
    subprocess.run([str(one) for one in command], check=True, timeout=300)
    return ctypes.CDLL(str(library)).make


@pytest.mark.parametrize("batch", [1, 33, 65, 150])
def test_a_cta_makes_the_schedule_of_one_thread(batch, threads):
    """CUDA's block has many threads. Here 64 threads of the CPU take their schedule_layout."""
    for _ in range(4):
        sizes = Sizes(random.choice([1, 9]), workers=random.choice([33, 132]), window_left=random.choice([-1, 700]))
        lens = drawn_lens(batch)
        want = schedule(int32(lens), sizes)
        at = schedule_layout(sizes, batch)
        storage = torch.full((at.lists + 8,), -7, dtype=torch.int32)
        plan = storage[-(storage.data_ptr() // 4) % 8 :][: at.lists]
        kv_indptr = torch.empty(batch + 1, dtype=torch.int32)
        merges_at = -(-(16 + 2 * batch) // 8) * 8
        items_at = merges_at + 8 * at.max_merges
        tensors = int32(lens), int32(list(sizes)), plan, kv_indptr  # alive during the call
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        threads(pointers[0], batch, *pointers[1:3], merges_at, items_at, items_at + 8 * at.max_items, pointers[3])
        got = parse(plan, kv_indptr, at, batch)
        assert got.merges == want.merges and sorted(got.items) == sorted(want.items)
        check(got, sizes, lens, [(b * sizes.q_len, sizes.q_len) for b in range(batch)])
        assert len(got.items) <= sizes.workers or is_ordered(got)
