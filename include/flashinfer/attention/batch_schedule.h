// Schedules made on the device: the lists of schedule.h, from lengths that the host does not know. One CTA
// (one thread of a CPU) makes them. Capacities depend on sizes that the host knows, so one CUDA graph serves
// any lengths.
//
// A worker is a CTA that runs concurrently with the others. The cut of keys aims at equal work of all
// workers:
//   - up to as many tiles as workers: equal splits of each tile, as short as one round of workers permits;
//   - otherwise, and if that round leaves workers idle: the keys of all tiles, laid end to end, are cut at multiples of
//     a worker's share. A tile ends or starts in the middle of a share, so that most tiles are not split.
// Items come by falling length, as long as more of them exist than workers. Slots follow the order of
// requests, so that equal lengths give equal bits of results.
#pragma once

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/common/fast_div.h>

#include <cstdint>

namespace flashinfer {

struct BatchScheduleParams {
  const int32_t* seq_lens;   // [batch_size], keys of each request. Beyond 0 ... most_keys, the nearer of both counts
  const int32_t* qo_indptr;  // [batch_size + 1]; null: each request has q_len queries. Longer requests are cut to q_len
  const float* sm_scale;     // null, or a scale that becomes numbers[kSmScale]
  int32_t batch_size, num_tokens, q_len, most_keys;
  int32_t table_stride;  // entries of the page table from one request to the next
  int32_t num_kv_heads, tile_rows;
  FastDiv group;
  MaskMode mask_mode;
  int32_t window_left;
  FastDiv workers;  // of one KV head

  int32_t *counts, *qo_lens, *kv_lens, *kv_indptr;
  MergeItem* merges;
  WorkItem* items;
  uint32_t* tickets;
  double* numbers;  // null, or [4], see Number
};

struct Launch;
void schedule_batch(const BatchScheduleParams& params, const Launch& where);

// Loops of the schedule stay loops: one CTA runs each instruction once or twice, and waits for its fetch.
#if defined(__CUDA_ARCH__)
#define FLASHINFER_ROLLED _Pragma("unroll 1")
#else
#define FLASHINFER_ROLLED
#endif

namespace batch_schedule {

constexpr int32_t kStep = 128;       // splits are multiples of this, which is a multiple of every kernel's tile
constexpr int32_t kShortest = 256;   // the least length of a split
constexpr int32_t kItemKeys = 128;   // the fixed cost of an item, in keys
constexpr int32_t kWholeKeys = 448;  // nothing is split if no tile has more keys, see kUnsplitKeys of merge.cuh
constexpr int32_t kCandidates = 16;  // lengths of splits in one round: the mean share times 1, 17/16, 18/16, ...
constexpr int32_t kBins = 64;        // of lengths, by which items are ordered
constexpr int32_t kMaxThreads = 256;
constexpr int32_t kMaxKeys = 1 << 30;  // of a request. Lengths of splits then have 31 bits

// Bounds on the lists, for any lengths. Each split beyond a tile's first ends at another worker's share.
FLASHINFER_HD int64_t max_tiles(int64_t batch_size, int64_t q_len, int64_t group, int64_t tile_rows) {
  return batch_size * ((q_len * group + tile_rows - 1) / tile_rows);
}
FLASHINFER_HD int64_t max_items(int64_t tiles, int64_t workers) { return tiles + workers; }
FLASHINFER_HD int64_t max_merges(int64_t tiles, int64_t workers) { return tiles < workers ? tiles : workers; }
FLASHINFER_HD int64_t max_slots(int64_t workers) { return 2 * workers; }

// Two numbers whose sums are computed together.
struct Sums {
  int64_t a, b;
};

// Memory that the threads of a CTA share.
struct Memory {
  Sums sums[2][32];
  int32_t longest[32], pieces[kCandidates], bins[kBins], lengths[kMaxThreads];
};

// The block of a single thread. BlockOfThreads of cuda/attention/batch_schedule.cuh has the same members.
struct OneThread {
  Memory& memory;

  FLASHINFER_HD int32_t thread() const { return 0; }
  FLASHINFER_HD int32_t threads() const { return 1; }
  FLASHINFER_HD int32_t log_threads() const { return 0; }
  FLASHINFER_HD int32_t lane() const { return 0; }
  FLASHINFER_HD int32_t lanes() const { return 1; }
  FLASHINFER_HD void sync() const {}
  // Wait for all threads, return the sums of all earlier ones, and set `all` to those of all. `number`: 0 or
  // 1, of memory that no earlier call has used.
  FLASHINFER_HD Sums before(int32_t, Sums own, Sums& all) const { return all = own, Sums{0, 0}; }
  // Store a length. After all threads have stored theirs, longest() returns the longest.
  FLASHINFER_HD void put_length(int32_t own) const { memory.longest[0] = own; }
  FLASHINFER_HD int32_t longest() const { return memory.longest[0]; }
  FLASHINFER_HD int32_t sum_of_lanes(int32_t own) const { return own; }
  FLASHINFER_HD int32_t add(int32_t& to, int32_t number) const { return to += number, to - number; }
  // Return the index of the first of kCandidates numbers that is at most `bound`, or kCandidates.
  FLASHINFER_HD int32_t first_at_most(const int32_t* numbers, int32_t bound) const {
    int32_t i = 0;
    while (i < kCandidates && numbers[i] > bound) ++i;
    return i;
  }
  // Turn the sizes of bins into their ends.
  FLASHINFER_HD void end_bins() const {
    for (int32_t bin = 1; bin < kBins; ++bin) memory.bins[bin] += memory.bins[bin - 1];
  }
};

// Return a / b for a >= 0 and b > 0. A GPU takes several times as long for 64 bits as for 32.
FLASHINFER_HD int64_t divide(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}
FLASHINFER_HD int64_t ceil_div(int64_t a, int64_t b) { return divide(a + b - 1, b); }
FLASHINFER_HD int64_t ceil_div(int64_t a, const FastDiv& b) {
  const int64_t n = a + b.divisor - 1;
  return n >> 31 == 0 ? b.div(static_cast<uint32_t>(n)) : n / b.divisor;
}
FLASHINFER_HD int64_t round_up(int64_t keys) { return (keys + kStep - 1) / kStep * kStep; }
FLASHINFER_HD int32_t ceil_log2(int32_t number) {
  if (number <= 1) return 0;
#if defined(__CUDA_ARCH__)
  return 32 - __clz(number - 1);
#else
  return 32 - __builtin_clz(static_cast<uint32_t>(number - 1));
#endif
}
FLASHINFER_HD int32_t length_of(const WorkItem& item) { return item.kv_end - item.kv_start; }
FLASHINFER_HD int32_t between(int32_t value, int32_t least, int32_t most) {
  return value < least ? least : value > most ? most : value;
}

// A request, with lengths inside of their bounds whatever the tables hold.
struct Request {
  WorkItem item{};
  int32_t rows;

  FLASHINFER_HD Request(const BatchScheduleParams& p, int32_t batch) {
    item.batch = batch, item.slot = -1;
    item.qo_start = between(p.qo_indptr ? p.qo_indptr[batch] : batch * p.q_len, 0, p.num_tokens);
    const int32_t most = p.q_len < p.num_tokens - item.qo_start ? p.q_len : p.num_tokens - item.qo_start;
    item.qo_len = p.qo_indptr ? between(p.qo_indptr[batch + 1] - item.qo_start, 0, most) : most;
    item.kv_len = between(p.seq_lens[batch], 0, p.most_keys);
    rows = item.qo_len * static_cast<int32_t>(p.group.divisor);
  }

  // Return a tile and the keys that its rows may see.
  FLASHINFER_HD WorkItem tile(const BatchScheduleParams& p, int32_t row_start) const {
    AttentionParams params{};  // only mode and window determine the extent of a mask
    params.mask_mode = p.mask_mode, params.window_left = p.window_left;
    const Mask mask(params, item);
    const int32_t end = row_start + p.tile_rows < rows ? row_start + p.tile_rows : rows;
    WorkItem tile = item;
    tile.row_start = row_start, tile.kv_start = mask.begin(static_cast<int32_t>(p.group.div(row_start)));
    tile.kv_end = mask.end(static_cast<int32_t>(p.group.div(end - 1)));
    if (tile.kv_end < tile.kv_start) tile.kv_end = tile.kv_start;
    return tile;
  }
};

// Requests of a thread. In a small batch several threads have the same request, and take its splits in
// rotation.
struct Range {
  int32_t first, last;       // requests
  int32_t number, together;  // of this thread among those of these requests, and how many these are

  template <typename Block>
  FLASHINFER_HD Range(const BatchScheduleParams& p, const Block& block) {
    const int32_t shift = between(block.log_threads() - ceil_log2(p.batch_size), 0, 30);
    together = 1 << shift, number = block.thread() & (together - 1);
    const auto each = shift > 0 ? 1 : static_cast<int32_t>(ceil_div(p.batch_size, block.threads()));
    first = between((block.thread() >> shift) * each, 0, p.batch_size), last = between(first + each, 0, p.batch_size);
  }

  FLASHINFER_HD bool is_first() const { return number == 0; }
  // Return the summands of this thread. Of those with the same requests, the last one has them, so that the
  // sums of earlier threads are those of earlier requests.
  FLASHINFER_HD Sums once(Sums own) const { return number == together - 1 ? own : Sums{0, 0}; }
};

// Call f(tile) for the tiles of requests first, first + step, ... in order.
template <typename F>
FLASHINFER_HD void for_tiles(const BatchScheduleParams& p, int32_t first, int32_t last, int32_t step, F&& f) {
  FLASHINFER_ROLLED
  for (int32_t batch = first; batch < last; batch += step) {
    const Request request(p, batch);
    FLASHINFER_ROLLED
    for (int32_t row = 0; row < request.rows; row += p.tile_rows) f(request.tile(p, row));
  }
}

// The tiles of a thread.
template <bool kInRegisters>
struct Tiles {
  const BatchScheduleParams& p;
  const Range& range;

  template <typename F>
  FLASHINFER_HD void each(F&& f) const {
    for_tiles(p, range.first, range.last, 1, f);
  }
  // Call f(request) for the requests of this thread.
  template <typename F>
  FLASHINFER_HD void each_request(F&& f) const {
    FLASHINFER_ROLLED
    for (int32_t batch = range.first; batch < range.last; ++batch) f(Request(p, batch).item);
  }
};

// At most one request with one tile, as in decode. Lengths are read once, and the code is two thirds as long.
template <>
struct Tiles<true> {
  bool has_request, has_tile;
  WorkItem tile{};

  FLASHINFER_HD Tiles(const BatchScheduleParams& p, const Range& range)
      : has_request(range.first < range.last), has_tile(false) {
    if (!has_request) return;
    const Request request(p, range.first);
    has_tile = request.rows > 0, tile = has_tile ? request.tile(p, 0) : request.item;
  }

  template <typename F>
  FLASHINFER_HD void each(F&& f) const {
    if (has_tile) f(tile);
  }
  template <typename F>
  FLASHINFER_HD void each_request(F&& f) const {
    if (has_request) f(tile);
  }
};

// The splits of a tile's keys.
struct Splits {
  int32_t count = 1;
  int64_t first = 0, step = 0;  // split i ends at first + i * step, rounded down

  // Return the end of split number `i`, as a key of the tile. The last one ends with the tile.
  FLASHINFER_HD int32_t end(int32_t i) const { return static_cast<int32_t>(first + i * step) / kStep * kStep; }

  // Call f(split, its number) for this thread's splits.
  template <typename F>
  FLASHINFER_HD void each(const Range& range, const WorkItem& tile, F&& f) const {
    WorkItem piece = tile;
    FLASHINFER_ROLLED
    for (int32_t i = range.number; i < count; i += range.together) {
      if (i > 0) piece.kv_start = tile.kv_start + end(i - 1);
      if (count > 1) piece.kv_end = i + 1 < count ? tile.kv_start + end(i) : tile.kv_end;
      f(piece, i);
    }
  }
};

// Return the length of equal splits, about as long as `chunk`.
FLASHINFER_HD int32_t equal_step(int32_t length, int32_t chunk) {
  const uint32_t keys = length, count = (keys + chunk - 1) / static_cast<uint32_t>(chunk);
  return static_cast<int32_t>(((keys + count - 1) / count + kStep - 1) / kStep * kStep);
}
FLASHINFER_HD int32_t equal_splits(int32_t length, int32_t step) {
  return static_cast<int32_t>((static_cast<uint32_t>(length) + step - 1) / static_cast<uint32_t>(step));
}

// The places where keys are cut.
struct Cuts {
  int32_t chunk = 0;  // other than 0: tiles have equal splits, about as long as this
  int64_t share = 0;  // other than 0: cuts at multiples of this of all tiles end to end

  // Return the splits of `length` keys. `start`: cost of all earlier tiles.
  FLASHINFER_HD Splits split(int32_t length, int64_t start) const {
    if (chunk > 0 && length > 0) {
      const int32_t step = equal_step(length, chunk);
      return {equal_splits(length, step), step, step};
    }
    if (share > 0 && length >= 2 * kShortest) {
      const int64_t begin = start + kItemKeys, number = ceil_div(begin + kShortest, share);
      const int64_t cuts = divide(begin + length - kShortest, share) - number + 1;
      if (cuts > 0) return {static_cast<int32_t>(cuts) + 1, number * share - begin, share};
    }
    return {};
  }

  // Return a bound on the lengths of splits.
  FLASHINFER_HD int64_t most(int32_t longest) const {
    const int64_t bound = chunk > 0 ? chunk : share > 0 ? share + 2 * kShortest : longest;
    return bound < longest ? bound : longest;
  }
};

FLASHINFER_HD int32_t candidate(int64_t mean, int32_t number) {
  const int64_t chunk = round_up((mean * (kCandidates + number) + kCandidates - 1) / kCandidates);
  return static_cast<int32_t>(chunk < kShortest ? kShortest : chunk);
}

// Return the number of splits of a warp's tiles, for equal splits of about `chunk` keys.
template <bool kInRegisters, typename Block>
FLASHINFER_HD int32_t count_splits(const BatchScheduleParams& p, const Block& block, int32_t chunk) {
  int32_t count = 0;
  const auto add = [&](int32_t length) {
    count += length > 0 ? equal_splits(length, equal_step(length, chunk)) : length == 0;
  };
  if constexpr (kInRegisters) {
    FLASHINFER_ROLLED
    for (int32_t b = block.lane(); b < p.batch_size; b += block.lanes()) add(block.memory.lengths[b]);
  } else {
    for_tiles(p, block.lane(), p.batch_size, block.lanes(), [&](const WorkItem& tile) { add(length_of(tile)); });
  }
  return block.sum_of_lanes(count);
}

// Choose the cuts. `total`: keys and fixed costs of all tiles.
template <bool kInRegisters, typename Block>
FLASHINFER_HD Cuts choose_cuts(const BatchScheduleParams& p, const Block& block, int64_t total, int64_t tiles,
                               int32_t longest) {
  Cuts cuts;
  const auto workers = static_cast<int32_t>(p.workers.divisor);
  if (longest <= kWholeKeys || workers <= 1) return cuts;
  int64_t share = ceil_div(total, p.workers) + kItemKeys;
  if (share < 2 * kShortest) share = 2 * kShortest;
  int64_t cost;  // of the busiest worker with equal splits, or with whole tiles
  if (tiles <= workers) {
    const int64_t mean = ceil_div(total - tiles * kItemKeys, p.workers);  // of keys
    FLASHINFER_ROLLED
    for (int32_t number = block.thread() / block.lanes(); number < kCandidates;
         number += block.threads() / block.lanes()) {
      const int32_t count = count_splits<kInRegisters>(p, block, candidate(mean, number));
      if (block.lane() == 0) block.memory.pieces[number] = count;
    }
    block.sync();
    const int32_t number = block.first_at_most(block.memory.pieces, workers);
    cuts.chunk = number < kCandidates ? candidate(mean, number) : 0;
    cost = (number < kCandidates && cuts.chunk < longest ? cuts.chunk : longest) + kItemKeys;
  } else {
    cost = ceil_div(tiles, p.workers) * (int64_t{longest} + kItemKeys);
    // Workers that take whole tiles differ by the longest at most.
    if (4 * int64_t{longest} <= share) return cuts;
  }
  if (10 * cost > 11 * share) cuts.chunk = 0, cuts.share = share;
  return cuts;
}

// Bins of items by their length, the longest first.
struct Bins {
  float scale;

  // `most`: a bound on the lengths.
  FLASHINFER_HD explicit Bins(int64_t most) : scale(most > 0 ? (kBins - 1) / static_cast<float>(most) : 0.0f) {}

  FLASHINFER_HD int32_t of(const WorkItem& item) const {
    const auto from_last = static_cast<int32_t>(static_cast<float>(length_of(item)) * scale);
    return from_last < kBins - 1 ? kBins - 1 - from_last : 0;
  }
};

// Make the lists. Runs in all threads of a block.
template <bool kInRegisters, typename Block>
FLASHINFER_HD void make_lists(const BatchScheduleParams& p, const Block& block) {
  Memory& memory = block.memory;
  const Range range(p, block);
  const Tiles<kInRegisters> tiles{p, range};
  FLASHINFER_ROLLED
  for (int32_t bin = block.thread(); bin < kBins; bin += block.threads()) memory.bins[bin] = 0;

  Sums own{0, 0}, all;  // cost and number of tiles
  int32_t own_longest = 0, own_length = -1;
  tiles.each([&](const WorkItem& tile) {
    own_length = length_of(tile);
    own.a += own_length + kItemKeys, ++own.b;
    own_longest = own_length > own_longest ? own_length : own_longest;
  });
  if (kInRegisters && range.first < range.last && range.is_first()) memory.lengths[range.first] = own_length;
  block.put_length(own_longest);
  const int64_t own_start = block.before(0, range.once(own), all).a;
  const int32_t longest = block.longest();
  const Cuts cuts = choose_cuts<kInRegisters>(p, block, all.a, all.b, longest);
  const bool may_be_ordered = cuts.chunk == 0;  // equal splits are at most as many as workers
  const Bins bins(may_be_ordered ? cuts.most(longest) : 0);

  Splits splits;  // of this thread's tile, if it has one only
  own = {0, 0};   // items; merges in the upper half, slots in the lower
  int64_t start = own_start;
  tiles.each([&](const WorkItem& tile) {
    splits = cuts.split(length_of(tile), start);
    own.a += splits.count, own.b += splits.count > 1 ? splits.count + (int64_t{1} << 32) : 0;
    start += length_of(tile) + kItemKeys;
    if (!may_be_ordered) return;
    splits.each(range, tile, [&](const WorkItem& piece, int32_t) { block.add(memory.bins[bins.of(piece)], 1); });
  });
  const Sums places = block.before(1, range.once(own), all);  // also waits for all bins
  const bool ordered = may_be_ordered && all.a > p.workers.divisor;
  if (ordered) block.end_bins();

  auto index = static_cast<int32_t>(places.a), slot = static_cast<int32_t>(places.b & 0x7fffffff);
  auto merge = static_cast<int32_t>(places.b >> 32);
  start = own_start;
  tiles.each([&](const WorkItem& tile) {
    if (!kInRegisters) splits = cuts.split(length_of(tile), start);
    const bool is_split = splits.count > 1;
    splits.each(range, tile, [&](const WorkItem& piece, int32_t i) {
      WorkItem& item = p.items[ordered ? block.add(memory.bins[bins.of(piece)], -1) - 1 : index + i];
      item = piece;
      item.slot = is_split ? slot + i : -1;
    });
    if (is_split && range.is_first())
      p.merges[merge] = {tile.batch, tile.qo_start, tile.qo_len, tile.row_start, slot, splits.count, {0, 0}};
    index += splits.count, merge += is_split, slot += is_split ? splits.count : 0;
    start += length_of(tile) + kItemKeys;
  });
  if (range.is_first()) {
    tiles.each_request([&](const WorkItem& request) {
      p.qo_lens[request.batch] = request.qo_len, p.kv_lens[request.batch] = request.kv_len;
      p.kv_indptr[request.batch] = request.batch * p.table_stride;
    });
  }
  const auto merges = static_cast<int32_t>(all.b >> 32), tickets = merges * p.num_kv_heads;
  FLASHINFER_ROLLED
  for (int32_t i = block.thread(); i < tickets; i += block.threads()) p.tickets[i] = 0;
  if (block.thread() != 0) return;
  p.kv_indptr[p.batch_size] = p.batch_size * p.table_stride;
  p.counts[0] = static_cast<int32_t>(all.a), p.counts[1] = merges;
  if (p.numbers == nullptr) return;
  p.numbers[kSmScale] = *p.sm_scale;
  p.numbers[kLogitsSoftCap] = p.numbers[kRopeScale] = p.numbers[kRopeTheta] = 1;
}

// Return true if Tiles<true> serves a block of `threads`.
FLASHINFER_HD bool fits_registers(const BatchScheduleParams& p, int32_t threads) {
  return p.batch_size <= threads && int64_t{p.q_len} * p.group.divisor <= p.tile_rows;
}

template <typename Block>
FLASHINFER_HD void make(const BatchScheduleParams& p, const Block& block) {
  if (fits_registers(p, block.threads())) {
    make_lists<true>(p, block);
  } else {
    make_lists<false>(p, block);
  }
}

}  // namespace batch_schedule
#undef FLASHINFER_ROLLED
}  // namespace flashinfer
