// Schedules made on the device: the lists of schedule.h, from lengths that the host does not know. One CTA (one
// thread of a CPU) makes them. Capacities depend on sizes that the host knows, so one CUDA graph serves any lengths.
//
// A worker is a CTA that runs concurrently with the others. The cut of keys aims at equal work of all workers:
//   - up to as many tiles as workers: equal splits of each tile, as short as one round of workers permits;
//   - otherwise, and if that round leaves workers idle: the keys of all tiles, laid end to end, are cut at multiples of
//     a worker's share. A tile ends or starts in the middle of a share, so that most tiles are not split.
// Items come by falling length, as long as more of them exist than workers. Slots follow the order of requests, so that
// equal lengths give equal bits of results.
#pragma once

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/params.h>

#include <cstdint>

namespace flashinfer {

struct BatchScheduleParams {
  const int32_t* seq_lens;   // [batch_size], keys of each request. Beyond 0 ... most_keys, the nearer of both counts
  const int32_t* qo_indptr;  // [batch_size + 1]; null: each request has q_len queries. Longer requests are cut to q_len
  const float* sm_scale;     // null, or a scale that becomes numbers[kSmScale]
  int32_t batch_size, num_tokens, q_len, most_keys;
  int32_t table_stride;  // entries of the page table from one request to the next
  int32_t num_kv_heads, group, tile_rows;
  MaskMode mask_mode;
  int32_t window_left;
  int32_t workers;  // of one KV head

  int32_t *counts, *qo_lens, *kv_lens, *kv_indptr;
  MergeItem* merges;
  WorkItem* items;
  uint32_t* tickets;
  double* numbers;  // null, or [4], see Number
};

struct Launch;
void schedule_batch(const BatchScheduleParams& params, const Launch& where);

namespace batch_schedule {

constexpr int32_t kStep = 128;       // splits are multiples of this, which is a multiple of every kernel's tile
constexpr int32_t kShortest = 256;   // the least length of a split
constexpr int32_t kItemKeys = 128;   // the fixed cost of an item, in keys
constexpr int32_t kWholeKeys = 448;  // nothing is split if no tile has more keys, see kUnsplitKeys of merge.cuh
constexpr int32_t kCandidates = 16;  // lengths of splits in one round: the mean share times 1, 17/16, 18/16, ...
constexpr int32_t kBins = 64;        // of lengths, by which items are ordered

// Bounds on the lists, for any lengths. Each split beyond a tile's first ends at another worker's share.
FLASHINFER_HD int64_t most_tiles(int64_t batch_size, int64_t q_len, int64_t group, int64_t tile_rows) {
  return batch_size * ((q_len * group + tile_rows - 1) / tile_rows);
}
FLASHINFER_HD int64_t most_items(int64_t tiles, int64_t workers) { return tiles + workers; }
FLASHINFER_HD int64_t most_merges(int64_t tiles, int64_t workers) { return tiles < workers ? tiles : workers; }
FLASHINFER_HD int64_t most_slots(int64_t workers) { return 2 * workers; }

// Two numbers whose sums are computed together.
struct Sums {
  int64_t a, b;
};

// Memory that the threads of a CTA share.
struct Memory {
  Sums sums[32];
  int32_t longest[32], pieces[kCandidates], bins[kBins];
};

// The block of a single thread. BlockOfThreads of cuda/attention/batch_schedule.cuh has the same members.
struct OneThread {
  Memory& memory;

  FLASHINFER_HD int32_t thread() const { return 0; }
  FLASHINFER_HD int32_t threads() const { return 1; }
  FLASHINFER_HD int32_t lane() const { return 0; }
  FLASHINFER_HD int32_t lanes() const { return 1; }
  FLASHINFER_HD void sync() const {}
  // Return the sums of all earlier threads, and set `all` to those of all threads.
  FLASHINFER_HD Sums before(Sums own, Sums& all) const { return all = own, Sums{0, 0}; }
  FLASHINFER_HD int32_t most(int32_t own) const { return own; }
  FLASHINFER_HD int32_t sum_of_lanes(int32_t own) const { return own; }
  FLASHINFER_HD int32_t add(int32_t& to, int32_t number) const { return to += number, to - number; }
  // Turn the sizes of bins into their ends.
  FLASHINFER_HD void end_bins() const {
    for (int32_t bin = 1; bin < kBins; ++bin) memory.bins[bin] += memory.bins[bin - 1];
  }
};

FLASHINFER_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
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
    rows = item.qo_len * p.group;
  }

  // Return a tile and the keys that its rows may see.
  FLASHINFER_HD WorkItem tile(const BatchScheduleParams& p, int32_t row_start) const {
    AttentionParams params{};  // only mode and window determine the extent of a mask
    params.mask_mode = p.mask_mode, params.window_left = p.window_left;
    const Mask mask(params, item);
    const int32_t end = row_start + p.tile_rows < rows ? row_start + p.tile_rows : rows;
    WorkItem tile = item;
    tile.row_start = row_start, tile.kv_start = mask.begin(row_start / p.group);
    tile.kv_end = mask.end((end - 1) / p.group);
    if (tile.kv_end < tile.kv_start) tile.kv_end = tile.kv_start;
    return tile;
  }
};

// Calls f(tile) for the tiles of this thread's requests, in order.
template <typename F>
FLASHINFER_HD void for_tiles(const BatchScheduleParams& p, int32_t first, int32_t last, int32_t step, F&& f) {
  for (int32_t batch = first; batch < last; batch += step) {
    const Request request(p, batch);
    for (int32_t row = 0; row < request.rows; row += p.tile_rows) f(request.tile(p, row));
  }
}

// The places where keys are cut.
struct Cuts {
  int32_t chunk = 0;  // other than 0: tiles have equal splits, about as long as this
  int64_t share = 0;  // other than 0: cuts at multiples of this of all tiles end to end

  // Return the number of splits of `length` keys. `start`: cost of all earlier tiles.
  FLASHINFER_HD int32_t pieces(int32_t length, int64_t start) const {
    if (chunk > 0 && length > 0) return static_cast<int32_t>(ceil_div(length, step(length)));
    if (share > 0 && length >= 2 * kShortest) {
      const int64_t last = (start + kItemKeys + length - kShortest) / share, count = last - first_cut(start) + 1;
      return count > 0 ? static_cast<int32_t>(count) + 1 : 1;
    }
    return 1;
  }

  // Return a bound on the lengths of splits.
  FLASHINFER_HD int64_t most(int32_t longest) const {
    const int64_t bound = chunk > 0 ? chunk : share > 0 ? share + 2 * kShortest : longest;
    return bound < longest ? bound : longest;
  }

  // Return the end of split number `i`, as a key of the tile. The last one ends with the tile.
  FLASHINFER_HD int32_t end(int32_t length, int64_t start, int32_t i) const {
    if (chunk > 0) return (i + 1) * step(length);
    return static_cast<int32_t>((first_cut(start) + i) * share - start - kItemKeys) / kStep * kStep;
  }

 private:
  FLASHINFER_HD int32_t step(int32_t length) const {
    const int64_t count = ceil_div(length, chunk);
    return static_cast<int32_t>(ceil_div(ceil_div(length, count), kStep) * kStep);
  }
  FLASHINFER_HD int64_t first_cut(int64_t start) const { return ceil_div(start + kItemKeys + kShortest, share); }
};

FLASHINFER_HD int32_t candidate(int64_t mean, int32_t number) {
  const int64_t chunk = ceil_div(mean * (kCandidates + number), kCandidates * int64_t{kStep}) * kStep;
  return static_cast<int32_t>(chunk < kShortest ? kShortest : chunk);
}

// Choose the cuts. `total`: keys and fixed costs of all tiles.
template <typename Block>
FLASHINFER_HD Cuts choose_cuts(const BatchScheduleParams& p, const Block& block, int64_t total, int64_t tiles,
                               int32_t longest) {
  Cuts cuts;
  if (longest <= kWholeKeys || p.workers <= 1) return cuts;
  const int64_t mean = ceil_div(total - tiles * kItemKeys, p.workers);  // of keys
  int64_t share = ceil_div(total + int64_t{p.workers} * kItemKeys, p.workers);
  if (share < 2 * kShortest) share = 2 * kShortest;
  int64_t cost;  // of the busiest worker with equal splits, or with whole tiles
  if (tiles <= p.workers) {
    for (int32_t number = block.thread() / block.lanes(); number < kCandidates;
         number += block.threads() / block.lanes()) {
      const Cuts tried{candidate(mean, number), 0};
      int32_t count = 0;
      for_tiles(p, block.lane(), p.batch_size, block.lanes(),
                [&](const WorkItem& tile) { count += tried.pieces(tile.kv_end - tile.kv_start, 0); });
      count = block.sum_of_lanes(count);
      if (block.lane() == 0) block.memory.pieces[number] = count;
    }
    block.sync();
    int32_t number = kCandidates;
    for (int32_t i = kCandidates - 1; i >= 0; --i) number = block.memory.pieces[i] <= p.workers ? i : number;
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

// Return the bin of an item. `longest` is a bound on the lengths of items.
FLASHINFER_HD int32_t bin_of(const WorkItem& item, int64_t longest) {
  const int64_t length = item.kv_end - item.kv_start;
  return length >= longest ? 0 : kBins - 1 - static_cast<int32_t>(length * (kBins - 1) / longest);
}

// Calls f(split, number of the split, number of splits) for the splits of a tile.
template <typename F>
FLASHINFER_HD void for_pieces(const Cuts& cuts, const WorkItem& tile, int64_t start, F&& f) {
  const int32_t length = tile.kv_end - tile.kv_start, count = cuts.pieces(length, start);
  WorkItem piece = tile;
  for (int32_t i = 0; i < count; ++i) {
    piece.kv_end = i + 1 < count ? tile.kv_start + cuts.end(length, start, i) : tile.kv_end;
    f(piece, i, count);
    piece.kv_start = piece.kv_end;
  }
}

// Make the lists. Runs in all threads of a block.
template <typename Block>
FLASHINFER_HD void make(const BatchScheduleParams& p, const Block& block) {
  Memory& memory = block.memory;
  const auto each = static_cast<int32_t>(ceil_div(p.batch_size, block.threads()));
  const int32_t first = between(block.thread() * each, 0, p.batch_size), last = between(first + each, 0, p.batch_size);
  for (int32_t bin = block.thread(); bin < kBins; bin += block.threads()) memory.bins[bin] = 0;
  if (block.thread() == 0 && p.numbers != nullptr) {
    p.numbers[kSmScale] = *p.sm_scale;
    p.numbers[kLogitsSoftCap] = p.numbers[kRopeScale] = p.numbers[kRopeTheta] = 1;
  }
  for (int32_t batch = first; batch < last; ++batch) {
    const Request request(p, batch);
    p.qo_lens[batch] = request.item.qo_len, p.kv_lens[batch] = request.item.kv_len;
    p.kv_indptr[batch] = batch * p.table_stride;
  }

  Sums own{0, 0}, all;  // cost and number of tiles
  int32_t own_longest = 0;
  for_tiles(p, first, last, 1, [&](const WorkItem& tile) {
    const int32_t length = tile.kv_end - tile.kv_start;
    own.a += length + kItemKeys, ++own.b;
    own_longest = length > own_longest ? length : own_longest;
  });
  const int32_t longest = block.most(own_longest);
  const int64_t own_start = block.before(own, all).a;
  const Cuts cuts = choose_cuts(p, block, all.a, all.b, longest);
  const int64_t most = cuts.most(longest);

  own = {0, 0};  // items; merges in the upper half, slots in the lower
  int64_t start = own_start;
  for_tiles(p, first, last, 1, [&](const WorkItem& tile) {
    for_pieces(cuts, tile, start, [&](const WorkItem& piece, int32_t i, int32_t count) {
      ++own.a, own.b += count > 1 ? 1 + (i == 0 ? int64_t{1} << 32 : 0) : 0;
      block.add(memory.bins[bin_of(piece, most)], 1);
    });
    start += tile.kv_end - tile.kv_start + kItemKeys;
  });
  const Sums places = block.before(own, all);  // also waits for all bins
  const bool ordered = all.a > p.workers;
  if (ordered) block.end_bins();

  auto index = static_cast<int32_t>(places.a), slot = static_cast<int32_t>(places.b & 0x7fffffff);
  auto merge = static_cast<int32_t>(places.b >> 32);
  start = own_start;
  for_tiles(p, first, last, 1, [&](const WorkItem& tile) {
    for_pieces(cuts, tile, start, [&](const WorkItem& piece, int32_t i, int32_t count) {
      if (count > 1 && i == 0)
        p.merges[merge++] = {tile.batch, tile.qo_start, tile.qo_len, tile.row_start, slot, count, {0, 0}};
      WorkItem& item = p.items[ordered ? block.add(memory.bins[bin_of(piece, most)], -1) - 1 : index++];
      item = piece;
      if (count > 1) item.slot = slot++;
    });
    start += tile.kv_end - tile.kv_start + kItemKeys;
  });
  const int64_t tickets = (all.b >> 32) * p.num_kv_heads;
  for (int64_t i = block.thread(); i < tickets; i += block.threads()) p.tickets[i] = 0;
  if (block.thread() == 0) {
    p.kv_indptr[p.batch_size] = p.batch_size * p.table_stride;
    p.counts[0] = static_cast<int32_t>(all.a), p.counts[1] = static_cast<int32_t>(all.b >> 32);
  }
}

}  // namespace batch_schedule
}  // namespace flashinfer
