// Shapes of the portable kernel of multi-head latent attention: its tile, its smem, and the lanes that copy a
// row.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda::sm80 {

// kKeys: keys of a tile. kStages: tiles in smem, 1 or 2. kScaled: each latent has scales, copied with its
// tile.
template <int kRows_, int kKeys_, int kStages_, typename KV_, bool kScaled_ = false>
struct MlaShape {
  using KV = KV_;
  static constexpr int kRows = kRows_, kKeys = kKeys_, kStages = kStages_, kThreads = 256;
  static constexpr bool kWidens = sizeof(KV) == 1, kScaled = kScaled_;
  static constexpr int kBytes = 2 * (kMlaCkv + kMlaKpe);  // of a row of queries or keys
  static constexpr int kCopiedBytes = sizeof(KV) * (kMlaCkv + kMlaKpe), kCopiedUnits = kCopiedBytes / 16;
  // For S, a warp has 16 rows and half of the keys. For O, it has 32 rows and kColumns columns.
  static constexpr int kSWarps = kRows / 16 * 2, kHalf = kKeys / 2, kColumns = kMlaCkv * (kRows / 32) / 8;
  // With kSplitsHeadDim, two warps compute S of 32 rows and the same half of the keys. Each sums over half of
  // the head dimension, and they exchange the sums of 16 rows. That loads only three quarters of the
  // fragments. The exchange uses smem of the next tile, so the last kLateRows rows of that tile are copied
  // later.
  static constexpr bool kSplitsHeadDim = kRows == 64 && kKeys == 64 && kStages == 2;
  static constexpr int kPairRows = kSplitsHeadDim ? 32 : 16, kExchangeBytes = 16 * kHalf * 4;  // of a warp
  static constexpr int kLateRows = kSplitsHeadDim ? (8 * kExchangeBytes / kCopiedBytes + 16) / 16 * 16 : 0;
  static constexpr int kQueryBytes = kRows * kBytes, kStageBytes = kKeys * kCopiedBytes, kPRowBytes = 2 * kKeys;
  static constexpr int kWidenedAt = kQueryBytes + kStages * kStageBytes;
  static constexpr int kPAt = kWidenedAt + (kWidens ? kKeys * kBytes : 0);
  static constexpr int kStateAt = kPAt + kRows * kPRowBytes;
  static constexpr int kScalesAt = kStateAt + 3 * kRows * 4, kStageScaleBytes = kKeys * kMlaScales * 4;
  static constexpr int kSharedBytes = kScalesAt + (kScaled ? kStages * kStageScaleBytes : 0);
  static_assert(kRows == 32 || kRows == 64, "eight warps cover 32 rows or twice as many");
  static_assert(kKeys == 32 || kKeys == 64, "4 or 8 lanes copy a row of keys");
  static_assert(kStages == 1 || kStages == 2, "the copy of the next tile follows the products or overlaps them");
  static_assert(kWidens || !kScaled, "scales are applied when latents are widened");
};

// Softmax state of rows in smem. of_half: row maxima over each half of the keys, and at the end l of each
// half. rescale: the factor of O.
template <typename S>
struct MlaState {
  float of_half[2][S::kRows], rescale[S::kRows];
};

// Part of a thread in the copy of kItems rows. kLanes lanes copy a row, each every kLanes-th 16-byte unit.
template <int kItems, int kThreads>
struct RowLane {
  static constexpr int kLanes = kThreads / kItems;
  static_assert(kLanes == 4 || kLanes == 8, "the lanes of a row read whole 32-byte sectors");
  int row, unit;

  // Eight lanes store at a time, without bank conflicts if they hit all banks. If they have two rows,
  // swizzled rows must be four apart, and unswizzled rows must be adjacent.
  __device__ __forceinline__ explicit RowLane(bool swizzled) {
    const int index = static_cast<int>(threadIdx.x) / kLanes;
    row = swizzled && kLanes == 4 ? (index & ~7) | (index % 2 * 4 + index / 2 % 4) : index;
    unit = static_cast<int>(threadIdx.x) % kLanes;
  }

  // Copy this lane's units of a latent and of its rotary key, or zeros if `valid` is false. kSwizzled: `to`
  // is the start of swizzled rows of `S`.
  template <typename S, bool kSwizzled, typename E>
  __device__ __forceinline__ void copy(uint32_t to, const E* latent, const E* rotary, bool valid) const {
    constexpr int kEach = 16 / sizeof(E), kLatent = kMlaCkv / kEach, kRotary = kMlaKpe / kEach;
    const uint32_t first = kSwizzled ? Swizzle<S::kBytes>::chunk(Swizzle<S::kBytes>::row(to, row), unit)
                                     : to + (row * (kLatent + kRotary) + unit) * 16;
    const auto address = [&](int offset) {
      return kSwizzled ? (first ^ (offset % 8 * 16)) + (offset & ~7) * 16 : first + offset * 16;
    };
    latent += unit * kEach, rotary += unit * kEach;
#pragma unroll
    for (int i = 0; i < kLatent; i += kLanes) ptx::cp_async_16(address(i), latent + i * kEach, valid);
#pragma unroll
    for (int i = 0; i < kRotary; i += kLanes)
      if (i + kLanes <= kRotary || i + unit < kRotary)
        ptx::cp_async_16(address(kLatent + i), rotary + i * kEach, valid);
  }
};

}  // namespace flashinfer::cuda::sm80
