// Tiles of keys or values from pages that are too small for the copy engine: every lane of a warp copies 16 bytes at a
// time. A warp has less time for a tile than it takes: one for keys and one for values leave the last rows of both to
// a third, which has nothing to clear where values behind the end come as zeros.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>

namespace flashinfer::cuda::sm90 {

// Whether a cache is gathered. Its full barriers count lanes instead of a box's bytes, and what a lane copied is made
// visible to the tensor cores by those who wait (copy engine: by itself).
FLASHINFER_HD bool is_gathered(const KvCache& kv) { return kv.is_paged() && kv.page_size.divisor % kPageKeys != 0; }

// Keys or values of one head, gathered by a warp: kNumRows rows of every tile.
template <typename S, int kUnits, int kFirstRow, int kNumRows>
struct Gatherer {
  static constexpr int kRounds = (kNumRows + 31) / 32;
  const KvCache& kv;
  const char* rows;  // of the head
  int64_t page_stride, row_stride;
  int32_t first_page, first_key, end;  // of the request; keys behind the end become zeros
  int64_t* table;                      // in shared memory: where the rows of a tile are, of all warps

  // The pages of a tile's rows, those of row r in lane r % 32: looked up before they are needed.
  __device__ __forceinline__ void look_up(int32_t (&pages)[kRounds], int32_t tile) const {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int32_t key = first_key + tile * S::kKeys + kFirstRow + round * 32 + static_cast<int32_t>(threadIdx.x) % 32;
      pages[round] = tile >= 0 && key < end ? kv.indices[first_page + static_cast<int32_t>(kv.page_size.div(key))] : 0;
    }
  }

  // A tile, to `to`; lanes arrive at `barrier` when what they copied is there.
  __device__ __forceinline__ void copy(const int32_t (&pages)[kRounds], int32_t tile, uint32_t to,
                                       uint32_t barrier) const {
    // As many lanes as a row of a chunk has units share a row, and go through the rows that lie that many groups apart;
    // four rows' places are read at once.
    constexpr int kLanes = S::kWidth / 16, kGroups = 32 / kLanes, kRows = kNumRows / kGroups;
    static_assert(kRows % 4 == 0 && kUnits % kLanes == 0, "lanes copy four rows at a time, chunk by chunk");
    auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    asm volatile("" : "+r"(lane));  // what follows from it is computed for each tile: this warp has few registers
    __syncwarp();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int32_t row = round * 32 + lane, key = first_key + tile * S::kKeys + kFirstRow + row;
      const auto in_page = static_cast<int32_t>(key - kv.page_size.div(key) * kv.page_size.divisor);
      if (row < kNumRows)
        table[kFirstRow + row % kGroups * kRows + row / kGroups] =
            key < end ? S::kElement * (pages[round] * page_stride + in_page * row_stride) : 0;
    }
    __syncwarp();
    const int group = lane / kLanes, unit = lane % kLanes;
    const char* const from = rows + unit * 16;
    const auto* place = reinterpret_cast<const longlong2*>(table + kFirstRow + group * kRows);
    uint32_t at = to + S::Keys::unit(kFirstRow + group, unit);
    int32_t left = end - first_key - tile * S::kKeys - kFirstRow - group;  // rows from the group's first one to the end
    // From a group's row to its next one the swizzle changes this bit, or none.
    constexpr uint32_t kStep = kGroups * S::kWidth, kFlip = tma_swizzle<S::kWidth>(kStep) ^ kStep;
    static_assert(2 * kStep % S::Keys::kAlignment == 0);
#pragma unroll 1
    for (int row = 0; row < kRows; row += 4, place += 2, at += 4 * kStep, left -= 4 * kGroups) {
      const longlong2 places[2] = {place[0], place[1]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* const row_from = from + (i % 2 ? places[i / 2].y : places[i / 2].x);
        const uint32_t row_to = (i % 2 ? at ^ kFlip : at) + i * kStep;
#pragma unroll
        for (int chunk = 0; chunk < kUnits / kLanes; ++chunk)
          ptx::cp_async_16(row_to + chunk * S::Keys::kChunkBytes, row_from + chunk * S::kWidth, i * kGroups < left);
      }
    }
    ptx::mbarrier_arrive_after_cp_async(barrier);
  }

  // All tiles of an item, from the last to the first.
  template <typename R, typename F>
  __device__ __forceinline__ void copy_all(const R& ring, int& use, int32_t tiles, F place) const {
    int32_t pages[kRounds];
    look_up(pages, tiles - 1);
#pragma unroll 1
    for (int32_t tile = tiles - 1; tile >= 0; --tile, ++use) {
      ring.wait_empty(use);
      copy(pages, tile, place(use), ring.full(use));
      look_up(pages, tile - 1);
    }
  }
};

}  // namespace flashinfer::cuda::sm90
