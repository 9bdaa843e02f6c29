// Gather tiles of keys or values from pages that are too small for TMA: every lane of a warp copies 16 bytes
// at a time. One warp per tensor would be slower than the products of a tile. One warp therefore gathers keys
// and one gathers values, without the last rows, which a third warp gathers. Values after the end are copied
// as zeros, so the third warp need not clear them.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>

namespace flashinfer::cuda::sm90 {

// Return true if a cache is gathered. Full barriers then count lanes instead of bytes, and consumers fence
// the generic writes for the tensor cores. TMA needs no fence.
FLASHINFER_HD bool is_gathered(const KvCache& kv) { return kv.is_paged() && kv.page_size.divisor % kPageKeys != 0; }

// Gather keys or values of one head in one warp: rows kFirstRow to kFirstRow + kNumRows - 1 of every tile,
// each of kUnits 16-byte units.
template <typename S, int kUnits, int kFirstRow, int kNumRows>
struct Gatherer {
  static constexpr int kRounds = (kNumRows + 31) / 32;
  const KvCache& kv;
  const char* rows;  // of the head
  int64_t page_stride, row_stride;
  int32_t first_page, first_key, end;  // of the request; keys after the end become zeros
  int64_t* table;                      // in shared memory: addresses of a tile's rows, of all warps

  // Look up the pages of a tile's rows before they are needed. Lane r % 32 has row r.
  __device__ __forceinline__ void look_up(int32_t (&pages)[kRounds], int32_t tile) const {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int32_t key = first_key + tile * S::kKeys + kFirstRow + round * 32 + static_cast<int32_t>(threadIdx.x) % 32;
      pages[round] = tile >= 0 && key < end ? kv.indices[first_page + static_cast<int32_t>(kv.page_size.div(key))] : 0;
    }
  }

  // Copy a tile to `to`. Lanes arrive at `barrier` when their copies are complete.
  __device__ __forceinline__ void copy(const int32_t (&pages)[kRounds], int32_t tile, uint32_t to,
                                       uint32_t barrier) const {
    // kLanes lanes share a row of a chunk, one per unit, and take every kGroups-th row. Four addresses are
    // read together.
    constexpr int kLanes = S::kChunkRowBytes / 16, kGroups = 32 / kLanes, kRows = kNumRows / kGroups;
    static_assert(kRows % 4 == 0 && kUnits % kLanes == 0, "lanes copy four rows at a time, chunk by chunk");
    auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    asm volatile("" : "+r"(lane));  // recomputes dependent values per tile: this warp has few registers
    __syncwarp();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int32_t row = round * 32 + lane, key = first_key + tile * S::kKeys + kFirstRow + row;
      const auto in_page = static_cast<int32_t>(key - kv.page_size.div(key) * kv.page_size.divisor);
      if (row < kNumRows)
        table[kFirstRow + row % kGroups * kRows + row / kGroups] =
            key < end ? S::kElementBytes * (pages[round] * page_stride + in_page * row_stride) : 0;
    }
    __syncwarp();
    const int group = lane / kLanes, unit = lane % kLanes;
    const char* const from = rows + unit * 16;
    const auto* next = reinterpret_cast<const longlong2*>(table + kFirstRow + group * kRows);
    uint32_t at = to + S::Keys::unit(kFirstRow + group, unit);
    int32_t left = end - first_key - tile * S::kKeys - kFirstRow - group;  // rows from the group's first one to the end
    // The swizzle of a group's rows alternates: every second address has the bits of kFlip flipped.
    constexpr uint32_t kStep = kGroups * S::kChunkRowBytes, kFlip = tma_swizzle<S::kChunkRowBytes>(kStep) ^ kStep;
    static_assert(2 * kStep % S::Keys::kAlignment == 0);
#pragma unroll 1
    for (int row = 0; row < kRows; row += 4, next += 2, at += 4 * kStep, left -= 4 * kGroups) {
      const longlong2 offsets[2] = {next[0], next[1]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* const row_from = from + (i % 2 ? offsets[i / 2].y : offsets[i / 2].x);
        const uint32_t row_to = (i % 2 ? at ^ kFlip : at) + i * kStep;
#pragma unroll
        for (int chunk = 0; chunk < kUnits / kLanes; ++chunk)
          ptx::cp_async_16(row_to + chunk * S::Keys::kChunkBytes, row_from + chunk * S::kChunkRowBytes,
                           i * kGroups < left);
      }
    }
    ptx::mbarrier_arrive_after_cp_async(barrier);
  }

  // Copy all tiles of an item, from the last to the first.
  template <typename R, typename F>
  __device__ __forceinline__ void copy_all(const R& ring, int& use, int32_t tiles, F address) const {
    int32_t pages[kRounds];
    look_up(pages, tiles - 1);
#pragma unroll 1
    for (int32_t tile = tiles - 1; tile >= 0; --tile, ++use) {
      ring.wait_empty(use);
      copy(pages, tile, address(use), ring.full(use));
      look_up(pages, tile - 1);
    }
  }
};

}  // namespace flashinfer::cuda::sm90
