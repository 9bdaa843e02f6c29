// Swizzled addresses of a tile's chunks in smem, so that no access of a warp has bank conflicts. The pattern
// of TMA and wgmma is tma_swizzle in descriptor.cuh.
#pragma once

#include <cstdint>

namespace flashinfer::cuda {

// Rows of kBytes in smem. Their 16-byte chunks are permuted so that one chunk of eight rows is in eight
// different groups of banks. Rows of an odd number of chunks need no permutation.
//
// kLineRows other than 0: each row of a tile of that many rows, a multiple of 8, is cut into lines of 128
// bytes (64 if it has no whole ones). The first lines of all rows come before the second ones. This is the
// layout of TMA's boxes and of wgmma, with a swizzle as wide as a line.
template <int kBytes, int kLineRows = 0>
struct Swizzle {
  static constexpr bool kWholeLines = kBytes % 128 == 0;
  static constexpr int kChunksOfPattern = kWholeLines ? 8 : kBytes % 64 == 0 ? 4 : kBytes % 32 == 0 ? 2 : 1;
  static constexpr int kLine = kWholeLines ? 128 : 64;
  static constexpr int kPitch = kLineRows > 0 ? kLine : kBytes;  // from one row to the next
  static constexpr int kMask = kChunksOfPattern - 1, kRowsOfPattern = 8 / kChunksOfPattern;
  static constexpr int kChunkStep =
      kLineRows > 0 && kBytes > kLine ? kLineRows * 16 : 16;  // from one line's first chunk to the next line's
  static_assert(kBytes > 0 && kBytes % (kLineRows > 0 ? 64 : 16) == 0, "a line is 64 or 128 bytes, a chunk 16");

  // Return the address of chunk 0 of a row. `start` is a multiple of 128.
  __device__ __forceinline__ static uint32_t row(uint32_t start, int row) {
    return start + row * kPitch + ((row / kRowsOfPattern) & kMask) * 16;
  }
  // Return the address of a chunk from that of chunk 0 of the row.
  __device__ __forceinline__ static uint32_t chunk(uint32_t row, int chunk) {
    return (row ^ ((chunk & kMask) * 16)) + (chunk & ~kMask) * kChunkStep;
  }
};

}  // namespace flashinfer::cuda
