// Shared memory and barriers of the Hopper kernel of multi-head latent attention.
//
// Two warpgroups compute, each half of the columns of the outputs of 64 rows; a third one loads. Keys come in blocks of
// 64, two of them in shared memory: block a is scored by warpgroup 0, block b by warpgroup 1, and both are multiplied
// by both. A block is nine chunks of 64 elements, each at once columns of keys and, but for the last, of values.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kMlaRows = 64, kMlaKeys = 64, kMlaThreads = 384;
constexpr int kMlaChunks = (kMlaCkv + kMlaKpe) / 64, kMlaSides = 3;
constexpr int kMlaLeft = 4;  // chunks of a warpgroup's columns
// Sides of a block become free at different times: 0, columns of warpgroup 0; 1, those of warpgroup 1; 2, the rotary
// chunk, which the copy engine brings with side 1. Their first chunks; of side kMlaSides, the number of all.
FLASHINFER_HD constexpr int mla_first_chunk(int side) { return side < kMlaSides ? side * kMlaLeft : kMlaChunks; }
// Of a thread: what lanes that gather need is more than what one that starts copies does.
template <bool kGather>
constexpr int kMlaLoadRegisters = kGather ? 56 : 40;
template <bool kGather>
constexpr int kMlaComputeRegisters = kGather ? 224 : 232;
using MlaChunk = ChunkedTile<64>;

// Named barriers: what one computing warpgroup has done for the other, by 256 threads; those of one by itself; and that
// of the one that gathers.
enum MlaBarrier { kMlaMaximaA = 1, kMlaMaximaB, kMlaWeightsA, kMlaWeightsB, kMlaOwn, kMlaGathered = kMlaOwn + 2 };

struct MlaShared {
  static constexpr uint32_t kChunk = MlaChunk::kChunkBytes, kBlock = kMlaChunks * kChunk;
  static constexpr uint32_t kKeysAt = kMlaCkv / 64 * kChunk;  // behind the queries' chunks but the rotary one
  static constexpr uint32_t kWeightsAt = kKeysAt + 2 * kBlock, kBarriersAt = kWeightsAt + 2 * kChunk;
  static constexpr uint32_t kStateAt = kBarriersAt + 8 * (2 * kMlaChunks + 2 * kMlaSides);
  static constexpr uint32_t kPagesAt = kStateAt + 4 * (3 * kMlaRows + 8);
  static constexpr uint32_t kBytes = kPagesAt + 4 * 2 * kMlaKeys + 1024;  // and what aligning takes

  uint32_t start;
  uint8_t* memory;

  __device__ __forceinline__ uint32_t queries() const { return start; }
  __device__ __forceinline__ uint32_t keys(int buffer) const { return start + kKeysAt + buffer * kBlock; }
  __device__ __forceinline__ uint32_t weights(int group) const { return start + kWeightsAt + group * kChunk; }
  __device__ __forceinline__ uint32_t full(int buffer, int chunk) const {
    return start + kBarriersAt + 8 * (buffer * kMlaChunks + chunk);
  }
  __device__ __forceinline__ uint32_t empty(int buffer, int side) const {
    return start + kBarriersAt + 8 * (2 * kMlaChunks + kMlaSides * buffer + side);
  }
  // What a warpgroup tells the other of its maxima: factors of what was summed before, by row, and whether there are
  // any, by warp; and the rows' references, which both have.
  __device__ __forceinline__ float* factors(int group) const {
    return reinterpret_cast<float*>(memory + kStateAt) + group * kMlaRows;
  }
  __device__ __forceinline__ float* references() const { return factors(2); }
  __device__ __forceinline__ volatile int* raised(int group) const {
    return reinterpret_cast<volatile int*>(factors(3)) + 4 * group;
  }

  // Of the rows of a pair of blocks, where rows are gathered; -1 behind the end.
  __device__ __forceinline__ int32_t* pages() const { return reinterpret_cast<int32_t*>(memory + kPagesAt); }

  __device__ __forceinline__ explicit MlaShared(uint8_t* raw) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    start = (at + 1023) & ~1023u;
    memory = raw + (start - at);
  }

  // By one thread.
  __device__ __forceinline__ void init(uint32_t full_arrivals) const {
    for (int i = 0; i < 2 * kMlaChunks; ++i) ptx::mbarrier_init(full(0, i), full_arrivals);
    for (int i = 0; i < 2 * kMlaSides; ++i) ptx::mbarrier_init(empty(0, i), 4);
    ptx::mbarrier_fence_init();
  }
};

// Blocks of an item's keys come in pairs; the last may lie behind the end, where keys are zeros that nobody sees.
__device__ __forceinline__ int mla_pairs(const WorkItem& item) {
  const int32_t length = item.kv_end - item.kv_start;
  return length <= 0 ? 1 : (length + 2 * kMlaKeys - 1) / (2 * kMlaKeys);
}

// Lanes copy the rows of pages of other sizes: boxes of 16 rows take the copy engine longer. They copy none where there
// are no pages, and a map of the copy engine has one at least.
inline bool mla_is_gathered(const KvCache& kv) { return kv.page_size.divisor % 32 != 0 || kv.num_pages == 0; }

}  // namespace flashinfer::cuda::sm90
