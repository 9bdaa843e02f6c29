// Transposition of 8-bit values: a warp converts copied tiles, with contiguous elements of a key, to tiles
// with contiguous keys.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/load.cuh>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/ptx/ldmatrix.cuh>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda::sm90 {

// Transpose a tile. In 16 keys, positions 4 q to 4 q + 3 hold keys {2 q, 2 q + 1, 8 + 2 q, 9 + 2 q}. A
// thread's elements of P of a row are then its part of the left operand of P V.
template <typename S>
__device__ __forceinline__ void transpose_tile(uint32_t from, uint32_t to) {
  const auto lane = static_cast<int>(threadIdx.x) % 32;
  // Lane 4 g + q has transposed pairs of elements d, d + 1 with d = 2 g. One matrix is stored from rows 0, 2,
  // 4, 6, 9, 11, 13, 15 and another from the remaining rows: eight rows in different banks.
  const uint32_t first = lane < 16 ? 0x6420 : 0x7531, second = lane < 16 ? 0x7531 : 0x6420;
  const int matrix = lane / 8, row = lane % 8, odd = (row < 4) == (matrix % 2 != 0);
  constexpr int kUnits = S::Transposed::kWidth / 16, kSteps = S::kKeys / 32;
  constexpr int kBatch = kSteps % 4 == 0 ? 4 : kSteps % 3 == 0 ? 3 : kSteps % 5 == 0 ? 5 : 2;
  static_assert(kSteps % kBatch == 0, "steps of 32 keys");
  constexpr int kUnitStride = 16 * S::Transposed::kWidth;
  uint32_t row_to = to + S::Transposed::unit(2 * row + odd, matrix / 2);
  constexpr int kUnitsAtOnce = kBatch == 2 ? 2 : 1;  // units of 16 elements at a time
#pragma unroll 1
  for (int unit = 0; unit < S::kDV / 16; unit += kUnitsAtOnce) {
#pragma unroll
    for (int start = 0; start < kSteps; start += kBatch) {
      uint32_t r[kUnitsAtOnce][kBatch][4];  // all loads come before the first use
#pragma unroll
      for (int across = 0; across < kUnitsAtOnce; ++across) {
        const uint32_t row_from = from + S::Keys::unit(lane, unit + across);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          ptx::ldmatrix_x4_trans(r[across][i], row_from + (start + i) * 32 * S::kChunkRowBytes);
      }
#pragma unroll
      for (int across = 0; across < kUnitsAtOnce; ++across) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          // Advance by whole patterns of the swizzle. Within a row, the swizzle is an XOR with the unit's
          // number.
          const int group = 2 * (start + i);
          const uint32_t (&from_keys)[4] = r[across][i];
          const uint32_t at =
              ((row_to + across * kUnitStride) ^ group % kUnits * 16) + group / kUnits * S::Transposed::kChunkBytes;
          ptx::stmatrix_x4(
              at, __byte_perm(from_keys[0], from_keys[1], first), __byte_perm(from_keys[0], from_keys[1], second),
              __byte_perm(from_keys[2], from_keys[3], first), __byte_perm(from_keys[2], from_keys[3], second));
        }
      }
    }
    row_to += kUnitsAtOnce * kUnitStride;
  }
}

// Clear rows [first, kKeys) of a tile.
template <typename S>
__device__ __forceinline__ void clear_rows(uint8_t* values, int32_t first) {
  constexpr int kUnits = S::kChunkRowBytes / 16;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < (S::kKeys - first) * kUnits; i += 32) {
#pragma unroll
    for (int chunk = 0; chunk < S::kChunksV; ++chunk)
      *reinterpret_cast<uint4*>(values + chunk * S::Keys::kChunkBytes + first * S::kChunkRowBytes + i * 16) =
          uint4{0, 0, 0, 0};
  }
}

// The transposing warp: the values of all items.
template <typename S>
__device__ __forceinline__ void transpose_all(const AttentionParams& params, const Shared<S>& shared) {
  const typename S::WorkRing work_ring = shared.work_ring();
  const typename S::RawRing raw = shared.raw_ring();
  const typename S::KeyRing values = shared.value_ring();
  const bool first_lane = threadIdx.x % 32 == 0;
  int value_use = 0;
#pragma unroll 1
  for (int use = 0;; ++use) {
    work_ring.wait_full(use);
    const Work& work = shared.work(use);
    const int32_t tiles = work.tiles, valid_rows = work.kv_len - work.first_key - (tiles - 1) * S::kKeys;
    const bool clears = tiles > 0 && must_clear<S>(params, work);
    __syncwarp();
    if (first_lane) work_ring.release(use);
    if (tiles < 0) return;
#pragma unroll 1
    for (int32_t tile = tiles - 1; tile >= 0; --tile, ++value_use) {
      raw.wait_full(value_use);
      if (clears && tile == tiles - 1) {
        clear_rows<S>(shared.bytes + (shared.raw_values(value_use) - shared.start), valid_rows);
        ptx::fence_proxy_async();  // TMA writes there next
        __syncwarp();
      }
      values.wait_empty(value_use);
      transpose_tile<S>(shared.raw_values(value_use), shared.values(value_use));
      ptx::fence_proxy_async();
      __syncwarp();
      if (first_lane) raw.release(value_use), values.arrive_full(value_use);
    }
  }
}

}  // namespace flashinfer::cuda::sm90
