// Tiles of 16-bit elements in smem in the layout of TMA and wgmma. A row is cut into chunks of kWidth bytes.
// One chunk of all rows follows the other, with adjacent rows in a chunk. The same bytes are an operand whose
// rows are M or N (K contiguous: queries, keys, P), and one whose rows are K (N contiguous: values).
#pragma once

#include <cstdint>

namespace flashinfer::cuda {

// Return the swizzled offset of the 16-byte unit at byte `at` of a tile. Tiles start at multiples of 8
// kWidth.
template <int kWidth>
__device__ __forceinline__ constexpr uint32_t tma_swizzle(uint32_t at) {
  return at ^ (((at >> 7) & (kWidth / 16 - 1)) << 4);
}

template <int kRows_, int kWidth_ = 128>
struct ChunkedTile {
  static constexpr int kRows = kRows_, kWidth = kWidth_;
  static constexpr int kElements = kWidth / 2;  // of a chunk's row
  static constexpr int kChunkBytes = kRows * kWidth, kAlignment = 8 * kWidth;
  static_assert(kWidth == 128 || kWidth == 64 || kWidth == 32, "a swizzle of 128, 64 or 32 bytes");
  static_assert(kRows % 8 == 0, "the swizzle's pattern has eight rows");

  // Return the descriptor of the operand at `address`, a row that is a multiple of 8, in the first chunk.
  __device__ __forceinline__ static uint64_t k_contiguous(uint32_t address) { return descriptor(address, 16); }
  __device__ __forceinline__ static uint64_t n_contiguous(uint32_t address) { return descriptor(address, kChunkBytes); }

  // Return the increment of a descriptor for step `step` of k, of 16 elements each.
  __device__ __forceinline__ static constexpr uint64_t k_contiguous_step(int step) {
    constexpr int kSteps = kWidth / 32;
    return static_cast<uint64_t>((step / kSteps * kChunkBytes + step % kSteps * 32) >> 4);
  }
  __device__ __forceinline__ static constexpr uint64_t n_contiguous_step(int step) {
    return static_cast<uint64_t>((step * 16 * kWidth) >> 4);
  }

  // Return the offset of the 16-byte unit `unit` of a row from the start of the tile.
  __device__ __forceinline__ static constexpr uint32_t unit(int row, int unit) {
    constexpr int kUnits = kWidth / 16;
    return unit / kUnits * kChunkBytes + tma_swizzle<kWidth>(row * kWidth + unit % kUnits * 16);
  }

 private:
  // Bits [0, 14): address. [16, 30): bytes from a chunk to the next. [32, 46): bytes from eight rows to the
  // next. All are divided by 16. [62, 64): 1, 2, 3 for a swizzle of 128, 64, 32 bytes.
  __device__ __forceinline__ static uint64_t descriptor(uint32_t address, uint32_t leading) {
    constexpr uint64_t kSwizzle = kWidth == 128 ? 1 : kWidth == 64 ? 2 : 3;
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(kAlignment >> 4) << 32 | kSwizzle << 62;
  }
};

}  // namespace flashinfer::cuda
