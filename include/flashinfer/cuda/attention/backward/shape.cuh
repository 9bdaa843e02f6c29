// Shapes of the portable kernels of attention's gradients, and the tables that a launch takes by value.
//
// A CTA owns the rows of one side of the logits, keys or queries, and their gradients. The other side, the
// columns, passes through stages. kSplit warps share 32 rows. Each computes the logits of kN columns of a
// step. From the logits of all columns, it computes its part of each row's gradient.
#pragma once

#include <cstdint>
#include <type_traits>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/common/search.h>

namespace flashinfer::cuda {

// A query row's lse and delta. lse is infinity if the row sees no key, so that its P is 0. dS = P * (dP -
// delta).
struct alignas(8) BackwardRow {
  float lse, delta;
};

template <typename T_, int kQK_, int kVO_, bool kOfKeys_, int kGroups_, int kSplit_, int kN_, int kColumns_,
          int kCtasPerSm_>
struct BackwardShape {
  using T = T_;
  static constexpr bool kOfKeys = kOfKeys_;  // rows are keys and columns queries, or the reverse
  static constexpr int kQK = kQK_, kVO = kVO_;
  static constexpr int kGroups = kGroups_, kSplit = kSplit_;                 // warps: kGroups times kSplit
  static constexpr int kN = kN_, kStep = kN * kSplit, kColumns = kColumns_;  // columns of a warp, a step and a stage
  static constexpr int kCtasPerSm = kCtasPerSm_;                             // CTAs per multiprocessor
  static constexpr int kRows = 32 * kGroups, kThreads = 32 * kGroups * kSplit;
  static constexpr int kTilesQK = kQK / kSplit / 8, kTilesVO = kVO / kSplit / 8;  // of a warp's gradients

  // Bytes of a row in shared memory. A stage of columns has rows of Q or K, rows of dO or V, and then a
  // BackwardRow per row if the columns are queries.
  static constexpr int kQKRow = 2 * kQK, kVORow = 2 * kVO, kExchangeRow = 2 * kStep;
  static constexpr int kRowsBytes = kRows * (kQKRow + kVORow), kTilesBytes = kColumns * (kQKRow + kVORow);
  static constexpr int kStageBytes = kTilesBytes + (kOfKeys ? kColumns * static_cast<int>(sizeof(BackwardRow)) : 0);
  static constexpr int kExchangeBytes = kSplit > 1 ? kRows * kExchangeRow : 0;
  static_assert(sizeof(T) == 2 && kN % 16 == 0 && kTilesQK % 2 == 0 && kTilesVO % 2 == 0, "fragments are 16 wide");
  static_assert(kColumns % kStep == 0 && (kSplit == 1 || kColumns == kStep), "an exchange is for one step of a stage");
  static_assert(kColumns <= kThreads && kStageBytes % 128 == 0 && kExchangeBytes % 128 == 0);

  static constexpr int shared_bytes(int stages) {
    return kRowsBytes + stages * kStageBytes + (kOfKeys ? 2 : 1) * kExchangeBytes;
  }
};

// A warp's registers hold 32 rows and 64 columns of both gradients of keys, or 128 columns of the one
// gradient of queries. Two CTAs per multiprocessor are faster than one of twice the size. FewQueries: used if
// Queries would leave half of the multiprocessors idle. The arguments are T, kQK, kVO, kOfKeys, kGroups,
// kSplit, kN, kColumns and kCtasPerSm.
template <typename T, int kQK, int kVO>
struct BackwardShapes;
template <typename T>
struct BackwardShapes<T, 64, 64> {
  using Keys = BackwardShape<T, 64, 64, true, 4, 1, 32, 64, 2>;
  using Queries = BackwardShape<T, 64, 64, false, 4, 1, 64, 64, 2>;
  using FewQueries = Queries;
};
template <typename T>
struct BackwardShapes<T, 128, 128> {
  using Keys = BackwardShape<T, 128, 128, true, 2, 2, 32, 64, 2>;
  using Queries = BackwardShape<T, 128, 128, false, 4, 1, 32, 32, 2>;
  using FewQueries = BackwardShape<T, 128, 128, false, 2, 2, 32, 64, 2>;
};
template <typename T>
struct BackwardShapes<T, 192, 128> {
  using Keys = BackwardShape<T, 192, 128, true, 4, 2, 16, 32, 1>;
  using Queries = BackwardShape<T, 192, 128, false, 4, 2, 32, 64, 1>;
  using FewQueries = Queries;
};
template <typename T>
struct BackwardShapes<T, 256, 256> {
  using Keys = BackwardShape<T, 256, 256, true, 2, 4, 16, 64, 1>;
  using Queries = BackwardShape<T, 256, 256, false, 2, 2, 32, 64, 1>;
  using FewQueries = Queries;
};

// One request. Its mask begins at byte mask_start of the mask of all requests.
struct BackwardEntry {
  int32_t qo_start, qo_len, kv_start, kv_len;
  int64_t mask_start;
  // Numbers of the request's first tiles: of rows, over a launch; of queries, over all requests (sm_90a only).
  int32_t first_row_tile, first_query_tile;
};

constexpr int kBackwardEntries = 64;  // of a launch

struct BackwardTable {
  int32_t count;
  BackwardEntry at[kBackwardEntries];

  // Return the request of a tile of rows. `tile` becomes its number in the request.
  __device__ __forceinline__ const BackwardEntry& find(int32_t& tile) const {
    const BackwardEntry& found = at[last_at_or_before(0, count, tile, [&](int i) { return at[i].first_row_tile; })];
    tile -= found.first_row_tile;
    return found;
  }
};

// The mask of a request. A query sees the keys from `left` positions before its own to `right` positions
// after it, both included. Positions are aligned at the end: the last query has the position of the last key.
struct BackwardMask {
  int32_t qo_len, kv_len, left, right;
  const uint8_t* bits;  // of the request; null: none

  FLASHINFER_HD BackwardMask(const PrefillBackwardParams& p, const BackwardEntry& entry)
      : qo_len(entry.qo_len), kv_len(entry.kv_len), left(qo_len + kv_len), right(qo_len + kv_len), bits(nullptr) {
    if (p.window_left >= 0 && p.window_left < left) left = p.window_left;
    if (p.mask_mode == MaskMode::kCausal) right = 0;
    if (p.mask_mode == MaskMode::kCustom) bits = p.custom_mask + entry.mask_start;
  }

  FLASHINFER_HD int32_t ahead(int32_t query, int32_t key) const { return key - query - (kv_len - qo_len); }

  // Rows first ... last interact with no column outside of [begin, end).
  template <bool kOfKeys>
  FLASHINFER_HD void columns(int32_t first, int32_t last, int32_t& begin, int32_t& end) const {
    const int64_t offset = kv_len - qo_len, count = kOfKeys ? qo_len : kv_len;
    const int64_t low = kOfKeys ? first - right - offset : first + offset - left;
    const int64_t high = kOfKeys ? last + left - offset + 1 : last + offset + right + 1;
    begin = static_cast<int32_t>(low < 0 ? 0 : low < count ? low : count);
    end = static_cast<int32_t>(high < begin ? begin : high < count ? high : count);
  }
};

}  // namespace flashinfer::cuda
