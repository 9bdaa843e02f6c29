// Plans, made on the host. A work item is a tile of queries with a range of keys. At any lengths, every
// worker (an SM, or a thread of a CPU) gets about the same amount of work.
//
// The keys of a tile are split if they exceed the mean share of a worker, as in Flash-Decoding (Dao et al.,
// 2023). Splits have about equal lengths. The longest items come first, and short ones fill the gaps at the
// end. Equal lengths that fill the machine are not split. If workers have few tiles and the fixed cost of an
// item is known, packing.h makes the splits, and items come in the order in which they start. There are at
// most as many items as tiles plus workers, which bounds the size of buffers.
#pragma once

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/packing.h>
#include <flashinfer/attention/params.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace flashinfer {

// The input of a plan, with lengths on the host.
struct PlanRequest {
  int32_t batch_size;
  const int32_t* qo_indptr;  // [batch_size + 1]; null: one query per request
  const int32_t* kv_lens;    // [batch_size]
  int32_t num_kv_heads, group;
  MaskMode mask_mode;
  int32_t window_left;
  int32_t tile_rows;
  int32_t concurrency;  // number of CTAs, or CPU threads, that run at one time, over all heads
  int32_t min_chunk;    // smallest length of a split: a shorter one costs more than its merge saves
  int32_t kv_step;      // splits are multiples of this
  bool split;           // false: no keys are split
  // Splits of every batch end at multiples of this, so the result of a request does not depend on other
  // requests. 0: the lengths of splits balance the work.
  int32_t kv_chunk = 0;
  // The fixed cost of an item, as a number of keys. Other than 0: if workers have few tiles, splits give all
  // workers the same cost; see packing.h.
  int32_t item_keys = 0;
  int32_t merge_keys = 0;  // the cost of a split's merge, summed over all workers
  // Nothing is split if no tile has more keys than this: a merge would take longer than the gain.
  int32_t whole_keys = 0;

  int32_t qo_start(int32_t b) const { return qo_indptr ? qo_indptr[b] : b; }
  int32_t qo_len(int32_t b) const { return qo_indptr ? qo_indptr[b + 1] - qo_indptr[b] : 1; }
};

struct Plan {
  std::vector<WorkItem> items;
  std::vector<MergeItem> merges;
  int32_t num_slots = 0, slot_rows = 0;
};

namespace schedule {

// Return a tile and the keys that its rows may see.
inline WorkItem tile_of(const PlanRequest& request, int32_t batch, int32_t row_start) {
  WorkItem item{};
  item.batch = batch, item.qo_start = request.qo_start(batch), item.qo_len = request.qo_len(batch);
  item.kv_len = request.kv_lens[batch], item.row_start = row_start, item.slot = -1;
  AttentionParams params{};  // the extent of a mask depends on these; the bits of a custom mask do not matter
  params.mask_mode = request.mask_mode == MaskMode::kCausal || request.mask_mode == MaskMode::kMultiItem
                         ? MaskMode::kCausal
                         : MaskMode::kNone;
  params.window_left = request.window_left;
  const Mask mask(params, item);
  const int32_t rows = item.qo_len * request.group;
  const int32_t last_row = std::min(row_start + request.tile_rows, rows) - 1;
  item.kv_start = mask.begin(row_start / request.group);
  item.kv_end = std::max(mask.end(last_row / request.group), item.kv_start);
  return item;
}

inline int32_t round_up(int64_t value, int32_t step) { return static_cast<int32_t>((value + step - 1) / step * step); }

// Return the number of splits. A quarter more than `chunk` is not worth a merge.
inline int32_t pieces_of(int32_t length, int32_t chunk) {
  return int64_t{length} * 4 > int64_t{chunk} * 5 ? static_cast<int32_t>((int64_t{length} + chunk - 1) / chunk) : 1;
}

// Return the keys of the busiest worker if tiles of these lengths are cut by `chunk` and assigned longest
// first, at most two splits per worker.
inline int32_t busiest(const std::vector<int32_t>& lengths, int32_t chunk, int32_t kv_step, size_t workers) {
  std::vector<int32_t> pieces;
  for (const int32_t length : lengths) {
    const int32_t count = pieces_of(length, chunk), step = round_up((int64_t{length} + count - 1) / count, kv_step);
    for (int32_t left = length; left > 0; left -= step) pieces.push_back(std::min(step, left));
  }
  if (pieces.empty()) return 0;
  std::sort(pieces.begin(), pieces.end(), [](int32_t a, int32_t b) { return a > b; });
  int32_t most = pieces[0];
  for (size_t i = workers; i < pieces.size() && i < 2 * workers; ++i)
    most = std::max(most, pieces[2 * workers - 1 - i] + pieces[i]);
  return most;
}

// Return the greatest length of a split: a worker's mean share. If that makes a few more splits than
// workers, these would wait for a whole round, and longer splits may finish sooner.
inline int32_t chunk_of(const PlanRequest& request, const std::vector<WorkItem>& tiles, int64_t workers) {
  std::vector<int32_t> lengths;
  int64_t total = 0;
  for (const WorkItem& tile : tiles) lengths.push_back(tile.kv_end - tile.kv_start), total += lengths.back();
  const int32_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  // The mean of long prefills has more than 31 bits; no piece is longer than a tile.
  const int64_t mean = std::min<int64_t>((total + workers - 1) / workers, longest);
  const int32_t share = std::max(round_up(mean, request.kv_step), round_up(request.min_chunk, request.kv_step));
  if (!request.split || static_cast<int64_t>(tiles.size()) > workers) return share;
  const int32_t max_pieces = pieces_of(longest, share);
  int32_t best = share, least = busiest(lengths, share, request.kv_step, static_cast<size_t>(workers));
  for (const int32_t fewer : {1, 2, max_pieces / 8, max_pieces / 4, max_pieces / 2}) {
    if (fewer == 0 || fewer >= max_pieces) continue;
    const int32_t pieces = max_pieces - fewer;
    const int32_t chunk = std::max(share, round_up((int64_t{longest} + pieces - 1) / pieces, request.kv_step));
    const int32_t most = busiest(lengths, chunk, request.kv_step, static_cast<size_t>(workers));
    if (most <= least) best = chunk, least = most;
  }
  return best;
}

// Return the length of the splits of a tile's keys, or 0 if it is not split. `chunk` is the balanced length.
inline int32_t step_of(const PlanRequest& request, const WorkItem& tile, int32_t chunk) {
  const int32_t length = tile.kv_end - tile.kv_start;
  if (!request.split || length == 0) return 0;
  if (request.kv_chunk > 0)
    return tile.kv_start / request.kv_chunk == (tile.kv_end - 1) / request.kv_chunk ? 0 : request.kv_chunk;
  const int32_t pieces = pieces_of(length, chunk);
  return pieces <= 1 ? 0 : round_up((int64_t{length} + pieces - 1) / pieces, request.kv_step);
}

// Return the number of tiles per request, or 1 unless all requests have as many, all tiles of a request see
// the same keys, and the number divides the workers.
inline int64_t tiles_together(const std::vector<WorkItem>& tiles, int64_t workers) {
  size_t count = 0;
  while (count < tiles.size() && tiles[count].batch == tiles[0].batch) ++count;
  if (count == 0 || tiles.size() % count != 0 || workers % static_cast<int64_t>(count) != 0) return 1;
  for (size_t i = 0; i < tiles.size(); ++i) {
    const WorkItem &tile = tiles[i], &first = tiles[i / count * count];
    if (tile.batch != first.batch || tile.kv_start != first.kv_start || tile.kv_end != first.kv_end) return 1;
    if (i % count == 0 && i > 0 && tile.batch == tiles[i - 1].batch) return 1;
  }
  return static_cast<int64_t>(count);
}

inline void add_merge(Plan& made, const PlanRequest& request, const WorkItem& tile) {
  const int32_t rows = std::min(request.tile_rows, tile.qo_len * request.group - tile.row_start);
  made.merges.push_back({tile.batch, tile.qo_start, tile.qo_len, tile.row_start, made.num_slots, 0, {0, 0}});
  made.slot_rows = std::max(made.slot_rows, rows);
}

inline WorkItem next_piece(Plan& made, const WorkItem& tile, int32_t start, int32_t end) {
  WorkItem piece = tile;
  piece.kv_start = start, piece.kv_end = end, piece.slot = made.num_slots++;
  ++made.merges.back().num_slots;
  return piece;
}

// Tiles that see the same keys get equal splits next to each other: they run concurrently, and read these
// keys from memory once.
inline Plan packed(const PlanRequest& request, const std::vector<WorkItem>& tiles, int64_t workers) {
  const int64_t together = tiles_together(tiles, workers);
  std::vector<int32_t> lengths;
  for (size_t i = 0; i < tiles.size(); i += together) lengths.push_back(tiles[i].kv_end - tiles[i].kv_start);
  const int32_t step = request.kv_step;
  const PackingCosts costs{request.item_keys, request.merge_keys, round_up(std::max(request.min_chunk, 1), step), step};
  const std::vector<PackedPiece> pieces = pack_pieces(lengths, static_cast<size_t>(workers / together), costs);
  Plan made;
  std::vector<WorkItem> items;
  std::vector<std::pair<int64_t, size_t>> order;  // start and index of an item
  const auto add = [&](int64_t starts_at, const WorkItem& item) {
    order.emplace_back(starts_at, items.size());
    items.push_back(item);
  };
  for (size_t first = 0, last; first < pieces.size(); first = last) {
    for (last = first + 1; last < pieces.size() && pieces[last].range == pieces[first].range;) ++last;
    for (int64_t i = 0; i < together; ++i) {
      const WorkItem& tile = tiles[pieces[first].range * together + i];
      if (last == first + 1) {
        add(pieces[first].starts_at, tile);
        continue;
      }
      add_merge(made, request, tile);
      int32_t start = tile.kv_start;
      for (size_t piece = first; piece < last; start += pieces[piece++].length)
        add(pieces[piece].starts_at, next_piece(made, tile, start, start + pieces[piece].length));
    }
  }
  std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
    const auto key = [&](const auto& one) {
      const WorkItem& item = items[one.second];
      return std::make_tuple(one.first, item.kv_start - item.kv_end, item.batch, item.kv_start, -item.row_start);
    };
    return key(a) < key(b);
  });
  for (const auto& one : order) made.items.push_back(items[one.second]);
  return made;
}

}  // namespace schedule

inline Plan plan(const PlanRequest& given) {
  PlanRequest request = given;
  std::vector<WorkItem> tiles;
  int32_t longest = 0;
  for (int32_t b = 0; b < request.batch_size; ++b) {
    for (int32_t row = 0; row < request.qo_len(b) * request.group; row += request.tile_rows) {
      tiles.push_back(schedule::tile_of(request, b, row));
      longest = std::max(longest, tiles.back().kv_end - tiles.back().kv_start);
    }
  }
  if (request.kv_chunk == 0 && longest <= request.whole_keys) request.split = false;
  const int64_t workers = std::max<int64_t>(1, request.concurrency / std::max(1, request.num_kv_heads));
  if (request.item_keys > 0 && request.split && request.kv_chunk == 0 &&
      static_cast<int64_t>(tiles.size()) <= kPackedTiles * workers)
    return schedule::packed(request, tiles, workers);
  const int32_t chunk = schedule::chunk_of(request, tiles, workers);
  Plan result;
  result.items.reserve(tiles.size() + workers);
  for (const WorkItem& tile : tiles) {
    const int32_t step = schedule::step_of(request, tile, chunk);
    if (step == 0) {
      result.items.push_back(tile);
      continue;
    }
    schedule::add_merge(result, request, tile);
    for (int32_t start = tile.kv_start, end; start < tile.kv_end; start = end) {
      const int64_t next = request.kv_chunk > 0 ? (int64_t{start} / step + 1) * step : int64_t{start} + step;
      end = static_cast<int32_t>(std::min<int64_t>(next, tile.kv_end));
      result.items.push_back(schedule::next_piece(result, tile, start, end));
    }
  }
  // Longest first. Equal lengths have a fixed order, so that a plan is reproducible. The last rows come
  // first: they see the most keys if a run has a causal mask that the plan did not. std::stable_sort would
  // keep the order of tiles. It aligns its buffer to 16 bytes, even if the element needs more.
  std::sort(result.items.begin(), result.items.end(), [](const WorkItem& a, const WorkItem& b) {
    const int32_t length_a = a.kv_end - a.kv_start, length_b = b.kv_end - b.kv_start;
    if (length_a != length_b) return length_a > length_b;
    if (a.batch != b.batch) return a.batch < b.batch;
    return a.row_start != b.row_start ? a.row_start > b.row_start : a.kv_start < b.kv_start;
  });
  return result;
}

// Return the schedule of one request without a plan.
inline SingleRequest plan_single(const PlanRequest& request) {
  const int32_t rows = request.qo_len(0) * request.group, length = request.kv_lens[0];
  SingleRequest single{request.qo_len(0), length, (rows + request.tile_rows - 1) / request.tile_rows, 1,
                       std::max(length, 1)};
  const int64_t blocks = static_cast<int64_t>(single.num_tiles) * request.num_kv_heads;
  if (request.split && length > request.whole_keys && blocks > 0 && blocks < request.concurrency) {
    const int64_t pieces = request.concurrency / blocks;
    single.kv_chunk = std::max(schedule::round_up((length + pieces - 1) / pieces, request.kv_step),
                               schedule::round_up(request.min_chunk, request.kv_step));
    single.num_chunks = std::max(1, (length + single.kv_chunk - 1) / single.kv_chunk);
  }
  return single;
}

}  // namespace flashinfer
