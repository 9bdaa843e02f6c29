// Packing of ranges of keys onto workers (CTAs or threads that run concurrently), on the host. A piece is a
// split of a range, or the whole range. It costs more than its keys: its start, its queries and its results
// take time too.
//
// The aim is the least cost of the busiest worker (makespan). For a given bound, ranges are packed longest
// first, each onto the worker where it fits best. A range that fits nowhere fills the emptiest worker, and
// the rest of it is packed next. Bounds are tried from the mean upwards until everything fits. Splits must be
// merged. Nothing is split unless the makespan shrinks by a tenth, merges included: smaller gains are below
// the error of a cost in keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace flashinfer {

struct PackingCosts {
  int32_t piece;     // cost of a piece in addition to its length
  int32_t merge;     // cost of a split, summed over all workers
  int32_t shortest;  // the least length of a split, a multiple of `step`
  int32_t step;      // splits are multiples of this, except the last of a range
};

// The pieces of a range are consecutive. starts_at: the cost of the worker's earlier pieces.
struct PackedPiece {
  int32_t range, length, worker;
  int64_t starts_at;
};

// The most ranges per worker for which packing pays. With more of them, longest first is as good.
constexpr int64_t kPackedTiles = 4;

namespace packing {

// Pack onto workers with `room` each. Return false if not everything fits. Each worker ends at most one
// split, so that pieces exceed ranges by at most the number of workers.
inline bool pack(const std::vector<int32_t>& lengths, const std::vector<int32_t>& longest_first, size_t workers,
                 const PackingCosts& costs, int64_t room, std::vector<PackedPiece>& pieces) {
  using Free = std::pair<int64_t, int32_t>;  // the room left on a worker
  std::vector<Free> free;
  for (size_t worker = 0; worker < workers; ++worker) free.emplace_back(room, static_cast<int32_t>(worker));
  pieces.clear();
  for (const int32_t range : longest_first) {
    int32_t left = lengths[range];
    for (;;) {
      const auto fits = std::lower_bound(free.begin(), free.end(), Free(int64_t{left} + costs.piece, 0));
      if (fits != free.end()) {
        const Free rest(fits->first - left - costs.piece, fits->second);
        pieces.push_back({range, left, rest.second, 0});
        free.erase(fits);
        free.insert(std::lower_bound(free.begin(), free.end(), rest), rest);
        break;
      }
      if (free.empty()) return false;
      const Free emptiest = free.back();
      free.pop_back();
      // The last split must not be too short either.
      const int64_t most = std::min<int64_t>(emptiest.first - costs.piece, int64_t{left} - costs.shortest);
      const auto length = static_cast<int32_t>(most < 0 ? 0 : most / costs.step * costs.step);
      if (length < costs.shortest) return false;
      pieces.push_back({range, length, emptiest.second, 0});
      left -= length;
    }
  }
  return true;
}

// Assign each whole range to the worker with the least cost so far. Return the makespan.
inline int64_t assign_whole(const std::vector<int32_t>& lengths, const std::vector<int32_t>& longest_first,
                            size_t workers, const PackingCosts& costs, std::vector<PackedPiece>& pieces) {
  using Used = std::pair<int64_t, int32_t>;
  std::priority_queue<Used, std::vector<Used>, std::greater<Used>> least;
  for (size_t worker = 0; worker < workers; ++worker) least.emplace(0, static_cast<int32_t>(worker));
  int64_t most = 0;
  for (const int32_t range : longest_first) {
    Used used = least.top();
    least.pop();
    pieces.push_back({range, lengths[range], used.second, 0});
    used.first += int64_t{lengths[range]} + costs.piece;
    most = std::max(most, used.first);
    least.push(used);
  }
  return most;
}

inline int64_t count_splits(const std::vector<PackedPiece>& pieces) {
  int64_t count = 0;
  for (size_t i = 0; i < pieces.size(); ++i)
    count += (i > 0 && pieces[i - 1].range == pieces[i].range) ||
             (i + 1 < pieces.size() && pieces[i + 1].range == pieces[i].range);
  return count;
}

// Orders each worker's pieces, the longest first.
inline void order_pieces(std::vector<PackedPiece>& pieces, size_t workers, const PackingCosts& costs) {
  std::vector<std::vector<PackedPiece*>> of_worker(workers);
  for (PackedPiece& piece : pieces) of_worker[piece.worker].push_back(&piece);
  for (auto& own : of_worker) {
    std::sort(own.begin(), own.end(), [](const PackedPiece* a, const PackedPiece* b) {
      return a->length != b->length ? a->length > b->length : a < b;
    });
    int64_t starts_at = 0;
    for (PackedPiece* piece : own) piece->starts_at = starts_at, starts_at += int64_t{piece->length} + costs.piece;
  }
}

}  // namespace packing

inline std::vector<PackedPiece> pack_pieces(const std::vector<int32_t>& lengths, size_t workers,
                                            const PackingCosts& costs) {
  std::vector<int32_t> longest_first(lengths.size());
  int64_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i)
    longest_first[i] = static_cast<int32_t>(i), total += int64_t{lengths[i]} + costs.piece;
  std::sort(longest_first.begin(), longest_first.end(),
            [&](int32_t a, int32_t b) { return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : a < b; });
  std::vector<PackedPiece> uncut, pieces;
  const int64_t cost = packing::assign_whole(lengths, longest_first, workers, costs, uncut);
  const int64_t count = static_cast<int64_t>(workers), mean = (total + count - 1) / count;
  const int64_t growth = std::max<int64_t>(costs.step, mean / 32);
  for (int64_t room = mean; 10 * room < 9 * cost; room += growth) {
    if (!packing::pack(lengths, longest_first, workers, costs, room, pieces)) continue;
    const int64_t merged = packing::count_splits(pieces) * costs.merge / count;
    if (10 * (room + merged) < 9 * cost) uncut.swap(pieces);
    break;
  }
  packing::order_pieces(uncut, workers, costs);
  return uncut;
}

}  // namespace flashinfer
