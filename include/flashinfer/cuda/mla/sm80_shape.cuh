// Shapes of the portable kernel of multi-head latent attention: its tile, its shared memory, and the lanes
// that copy a row.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda::sm80 {

// kKeys: keys of a tile. kStages: tiles in shared memory, 1 or 2. kScaled: latents have factors, copied next to the
// tiles.
template <int kRows_, int kKeys_, int kStages_, typename KV_, bool kScaled_ = false>
struct MlaShape {
  using KV = KV_;
  static constexpr int kRows = kRows_, kKeys = kKeys_, kStages = kStages_, kThreads = 256;
  static constexpr bool kWidens = sizeof(KV) == 1, kScaled = kScaled_;
  static constexpr int kBytes = 2 * (kMlaCkv + kMlaKpe);  // of a row of queries or keys
  static constexpr int kCopiedBytes = sizeof(KV) * (kMlaCkv + kMlaKpe), kCopiedUnits = kCopiedBytes / 16;
  // Warps of S: groups of 16 rows times halves of the keys. Warps of O: groups of 32 rows times groups of
  // columns.
  static constexpr int kLogitWarps = kRows / 16 * 2, kHalf = kKeys / 2, kColumns = kMlaCkv * (kRows / 32) / 8;
  // Two warps with the same half of the keys may share the products of 32 rows. Each sums over half of the
  // elements and sends the other its sums of 16 rows. That needs three quarters of the fragments. The
  // exchange uses memory of the next tile, whose last rows are therefore copied later.
  static constexpr bool kShares = kRows == 64 && kKeys == 64 && kStages == 2;
  static constexpr int kSharedRows = kShares ? 32 : 16, kExchangeBytes = 16 * kHalf * 4;  // of a warp
  static constexpr int kLateRows = kShares ? (8 * kExchangeBytes / kCopiedBytes + 16) / 16 * 16 : 0;
  static constexpr int kQueryBytes = kRows * kBytes, kStageBytes = kKeys * kCopiedBytes, kWeightBytes = 2 * kKeys;
  static constexpr int kWidenedAt = kQueryBytes + kStages * kStageBytes;
  static constexpr int kWeightsAt = kWidenedAt + (kWidens ? kKeys * kBytes : 0);
  static constexpr int kStateAt = kWeightsAt + kRows * kWeightBytes;
  static constexpr int kScalesAt = kStateAt + 3 * kRows * 4, kStageScaleBytes = kKeys * kMlaScales * 4;
  static constexpr int kSharedBytes = kScalesAt + (kScaled ? kStages * kStageScaleBytes : 0);
  static_assert(kRows == 32 || kRows == 64, "eight warps cover 32 rows or twice as many");
  static_assert(kKeys == 32 || kKeys == 64, "4 or 8 lanes copy a row of keys");
  static_assert(kStages == 1 || kStages == 2, "the next tile is copied after the products or during them");
  static_assert(kWidens || !kScaled, "latents are multiplied by their factors when they are widened");
};

// State of rows in shared memory: maxima of the halves of the keys (row sums at the end), and the factor that
// rescales O.
template <typename S>
struct MlaState {
  float half[2][S::kRows], rescale[S::kRows];
};

// One of the lanes that copy a row: its row, of kItems rows, and its first unit. Its other units follow
// kLanes apart.
template <int kItems, int kThreads>
struct RowLane {
  static constexpr int kLanes = kThreads / kItems;
  static_assert(kLanes == 4 || kLanes == 8, "lanes of a row read whole sectors");
  int row, unit;

  // Eight lanes that write together must meet all banks. Lanes of two rows do if swizzled rows are four
  // apart, or if unswizzled rows are adjacent.
  __device__ __forceinline__ explicit RowLane(bool swizzled) {
    const int index = static_cast<int>(threadIdx.x) / kLanes;
    row = swizzled && kLanes == 4 ? (index & ~7) | (index % 2 * 4 + index / 2 % 4) : index;
    unit = static_cast<int>(threadIdx.x) % kLanes;
  }

  // Copies this lane's units of a row's two parts, one after the other, or as many zeros if `valid` is false.
  // Swizzled: to rows of `S` that start at `to`.
  template <typename S, bool kSwizzled, typename E>
  __device__ __forceinline__ void copy(uint32_t to, const E* latent, const E* rotary, bool valid) const {
    constexpr int kEach = 16 / sizeof(E), kLatent = kMlaCkv / kEach, kRotary = kMlaKpe / kEach;
    const uint32_t first = kSwizzled ? Swizzle<S::kBytes>::chunk(Swizzle<S::kBytes>::row(to, row), unit)
                                     : to + (row * (kLatent + kRotary) + unit) * 16;
    const auto place = [&](int of_first) {
      return kSwizzled ? (first ^ (of_first % 8 * 16)) + (of_first & ~7) * 16 : first + of_first * 16;
    };
    latent += unit * kEach, rotary += unit * kEach;
#pragma unroll
    for (int i = 0; i < kLatent; i += kLanes) ptx::cp_async_16(place(i), latent + i * kEach, valid);
#pragma unroll
    for (int i = 0; i < kRotary; i += kLanes)
      if (i + kLanes <= kRotary || i + unit < kRotary) ptx::cp_async_16(place(kLatent + i), rotary + i * kEach, valid);
  }
};

}  // namespace flashinfer::cuda::sm80
