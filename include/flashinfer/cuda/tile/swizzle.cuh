// Where the chunks of a tile's rows lie in shared memory, so that no access of a warp meets the same banks twice.
// TMA's and wgmma's own pattern is tma_swizzle in descriptor.cuh.
#pragma once

#include <cstdint>

namespace flashinfer::cuda {

// Rows of kBytes in shared memory, their 16-byte chunks permuted so that the same chunk of eight rows lies in eight
// different groups of banks.
//
// kLineRows other than 0: of a tile of so many rows, a multiple of 8, each row is cut into lines of 128 bytes (64 where
// it has no whole ones), and the first lines of all rows come before the second: what TMA's boxes write and wgmma
// reads, with a swizzle as wide as a line.
template <int kBytes, int kLineRows = 0>
struct Swizzle {
  static constexpr bool kWholeLines = kBytes % 128 == 0;
  static constexpr int kLine = kWholeLines ? 128 : 64;
  static constexpr int kPitch = kLineRows > 0 ? kLine : kBytes;  // from one row to the next
  static constexpr int kMask = kWholeLines ? 7 : 3, kRowsOfPattern = kWholeLines ? 1 : 2;
  static constexpr int kChunkStep = kLineRows > 0 ? kLineRows * 16 : 16;  // of the first chunks of lines
  static_assert(kBytes > 0 && kBytes % 64 == 0, "a row is whole or half lines of 128 bytes");

  // Of chunk 0 of a row; `start` is a multiple of 128.
  __device__ __forceinline__ static uint32_t row(uint32_t start, int row) {
    return start + row * kPitch + ((row / kRowsOfPattern) & kMask) * 16;
  }
  // Of a chunk, from chunk 0 of the row.
  __device__ __forceinline__ static uint32_t chunk(uint32_t row, int chunk) {
    return (row ^ ((chunk & kMask) * 16)) + (chunk & ~kMask) * kChunkStep;
  }
};

}  // namespace flashinfer::cuda
