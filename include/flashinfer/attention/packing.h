// Packing of work into places that work at one time, where a piece costs more than its length: what starting it,
// fetching its queries and writing its results takes. Runs on the host.
//
// The aim is the least cost of the place that has the most. For a given cost, wholes are packed longest first, each
// into the place where it fits best; one that fits nowhere fills the emptiest place, and what is left of it goes on.
// The costs are tried from the mean upwards until all fits. Pieces must be put together again: where that, and what
// a cost in keys cannot tell, may take as long as what is gained, nothing is cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace flashinfer {

struct PackingCosts {
  int32_t piece;     // of a piece, besides its length
  int32_t merge;     // of a piece of a whole that is cut, over all places
  int32_t shortest;  // no piece of a whole that is cut is shorter than this, a multiple of `step`
  int32_t step;      // but for the last, pieces of a whole are multiples of this
};

// Pieces of a whole follow each other. starts_at: the cost of what the same place does before.
struct PackedPiece {
  int32_t whole, length, place;
  int64_t starts_at;
};

// Wholes for each place, at most, for which packing pays: with more of them longest first is as good.
constexpr int64_t kPackedTiles = 4;

namespace packing {

// Packs into places that can take `room` each; false: not all fits. A place is cut to at most once, so that there are
// at most as many more pieces than wholes as there are places.
inline bool pack(const std::vector<int32_t>& lengths, const std::vector<int32_t>& longest_first, size_t places,
                 const PackingCosts& costs, int64_t room, std::vector<PackedPiece>& pieces) {
  using Free = std::pair<int64_t, int32_t>;  // what a place can take still
  std::vector<Free> free;
  for (size_t place = 0; place < places; ++place) free.emplace_back(room, static_cast<int32_t>(place));
  pieces.clear();
  for (const int32_t whole : longest_first) {
    int32_t left = lengths[whole];
    for (;;) {
      const auto fits = std::lower_bound(free.begin(), free.end(), Free(int64_t{left} + costs.piece, 0));
      if (fits != free.end()) {
        const Free rest(fits->first - left - costs.piece, fits->second);
        pieces.push_back({whole, left, rest.second, 0});
        free.erase(fits);
        free.insert(std::lower_bound(free.begin(), free.end(), rest), rest);
        break;
      }
      if (free.empty()) return false;
      const Free emptiest = free.back();
      free.pop_back();
      // The last piece is not too short either.
      const int64_t most = std::min<int64_t>(emptiest.first - costs.piece, int64_t{left} - costs.shortest);
      const auto length = static_cast<int32_t>(most < 0 ? 0 : most / costs.step * costs.step);
      if (length < costs.shortest) return false;
      pieces.push_back({whole, length, emptiest.second, 0});
      left -= length;
    }
  }
  return true;
}

// Each whole to the place that has the least so far. Returns what the place with the most has.
inline int64_t spread(const std::vector<int32_t>& lengths, const std::vector<int32_t>& longest_first, size_t places,
                      const PackingCosts& costs, std::vector<PackedPiece>& pieces) {
  using Used = std::pair<int64_t, int32_t>;
  std::priority_queue<Used, std::vector<Used>, std::greater<Used>> least;
  for (size_t place = 0; place < places; ++place) least.emplace(0, static_cast<int32_t>(place));
  int64_t most = 0;
  for (const int32_t whole : longest_first) {
    Used used = least.top();
    least.pop();
    pieces.push_back({whole, lengths[whole], used.second, 0});
    used.first += int64_t{lengths[whole]} + costs.piece;
    most = std::max(most, used.first);
    least.push(used);
  }
  return most;
}

inline int64_t cut_pieces(const std::vector<PackedPiece>& pieces) {
  int64_t count = 0;
  for (size_t i = 0; i < pieces.size(); ++i)
    count += (i > 0 && pieces[i - 1].whole == pieces[i].whole) ||
             (i + 1 < pieces.size() && pieces[i + 1].whole == pieces[i].whole);
  return count;
}

// A place does its longest piece first.
inline void put_in_order(std::vector<PackedPiece>& pieces, size_t places, const PackingCosts& costs) {
  std::vector<std::vector<PackedPiece*>> of_place(places);
  for (PackedPiece& piece : pieces) of_place[piece.place].push_back(&piece);
  for (auto& mine : of_place) {
    std::sort(mine.begin(), mine.end(), [](const PackedPiece* a, const PackedPiece* b) {
      return a->length != b->length ? a->length > b->length : a < b;
    });
    int64_t starts_at = 0;
    for (PackedPiece* piece : mine) piece->starts_at = starts_at, starts_at += int64_t{piece->length} + costs.piece;
  }
}

}  // namespace packing

inline std::vector<PackedPiece> pack_pieces(const std::vector<int32_t>& lengths, size_t places,
                                            const PackingCosts& costs) {
  std::vector<int32_t> longest_first(lengths.size());
  int64_t total = 0;
  for (size_t i = 0; i < lengths.size(); ++i)
    longest_first[i] = static_cast<int32_t>(i), total += int64_t{lengths[i]} + costs.piece;
  std::sort(longest_first.begin(), longest_first.end(),
            [&](int32_t a, int32_t b) { return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : a < b; });
  std::vector<PackedPiece> uncut, pieces;
  const int64_t cost = packing::spread(lengths, longest_first, places, costs, uncut);
  const int64_t count = static_cast<int64_t>(places), mean = (total + count - 1) / count;
  const int64_t growth = std::max<int64_t>(costs.step, mean / 32);
  for (int64_t room = mean; 10 * room < 9 * cost; room += growth) {
    if (!packing::pack(lengths, longest_first, places, costs, room, pieces)) continue;
    const int64_t merged = packing::cut_pieces(pieces) * costs.merge / count;
    if (10 * (room + merged) < 9 * cost) uncut.swap(pieces);
    break;
  }
  packing::put_in_order(uncut, places, costs);
  return uncut;
}

}  // namespace flashinfer
