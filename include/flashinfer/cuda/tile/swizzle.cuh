// Where the chunks of a tile's rows lie in shared memory, so that no access of a warp meets the same banks twice.
// TMA's and wgmma's own pattern is tma_swizzle in descriptor.cuh.
#pragma once

#include <cstdint>

namespace flashinfer::cuda {

// Rows of kBytes in shared memory, their 16-byte chunks permuted so that the same chunk of eight rows lies in eight
// different groups of banks.
template <int kBytes>
struct Swizzle {
  static constexpr bool kWholeLines = kBytes % 128 == 0;
  static constexpr int kMask = kWholeLines ? 7 : 3, kRowsOfPattern = kWholeLines ? 1 : 2;
  static_assert(kBytes > 0 && kBytes % 64 == 0, "a row is whole or half lines of 128 bytes");

  // Of chunk 0 of a row; `start` is a multiple of 128.
  __device__ __forceinline__ static uint32_t row(uint32_t start, int row) {
    return start + row * kBytes + ((row / kRowsOfPattern) & kMask) * 16;
  }
  // Of a chunk, from chunk 0 of the row.
  __device__ __forceinline__ static uint32_t chunk(uint32_t row, int chunk) {
    return (row ^ ((chunk & kMask) * 16)) + (chunk & ~kMask) * 16;
  }
};

}  // namespace flashinfer::cuda
