// Shared memory and barriers of the Hopper kernel of multi-head latent attention.
//
// Two consumer warpgroups compute 64 rows, each half of the columns of O. A third warpgroup is the producer.
// smem holds two blocks of 64 keys, a and b. Warpgroup 0 computes S of a, warpgroup 1 S of b, and both
// multiply P of both blocks by V. A block has nine chunks of 64 columns. The first eight are key and value,
// the last is the rotary key.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kMlaRows = 64, kMlaKeys = 64, kMlaThreads = 384;
constexpr int kMlaChunks = (kMlaCkv + kMlaKpe) / 64;
constexpr int kMlaSideChunks = 4;    // chunks of a side
enum MlaBlock { kBlockA, kBlockB };  // the two blocks in shared memory
// Sides of a block: the columns of warpgroup 0, those of warpgroup 1, and the rotary chunk. The consumers
// release them at different times. TMA loads the rotary chunk together with the right side.
enum MlaSide { kMlaLeftSide, kMlaRightSide, kMlaRopeSide, kMlaSides };
// Return the first chunk of a side. For kMlaSides it is the number of chunks.
FLASHINFER_HD constexpr int mla_first_chunk(int side) { return side < kMlaSides ? side * kMlaSideChunks : kMlaChunks; }
// Registers of a producer thread. Gathering needs more than TMA does.
template <bool kGather>
constexpr int kMlaProducerRegisters = kGather ? 56 : 40;
template <bool kGather>
constexpr int kMlaConsumerRegisters = kGather ? 224 : 232;
using MlaChunk = ChunkedTile<64>;

// Named barriers. kMlaMax*: row maxima of a or b are in smem. kMlaP*: P of a or b is in smem. kMlaConsumer +
// group and kMlaProducer synchronise the threads of one warpgroup.
enum MlaBarrier {
  kMlaMaxReadyA = 1,
  kMlaMaxReadyB,
  kMlaPReadyA,
  kMlaPReadyB,
  kMlaConsumer,
  kMlaProducer = kMlaConsumer + 2
};

struct MlaShared {
  static constexpr uint32_t kChunk = MlaChunk::kChunkBytes, kBlock = kMlaChunks * kChunk;
  static constexpr uint32_t kKeysAt = kMlaCkv / 64 * kChunk;  // after the queries' chunks, without the rotary one
  static constexpr uint32_t kPAt = kKeysAt + 2 * kBlock, kBarriersAt = kPAt + 2 * kChunk;
  static constexpr uint32_t kStateAt = kBarriersAt + 8 * (2 * kMlaChunks + 2 * kMlaSides);
  static constexpr uint32_t kPagesAt = kStateAt + 4 * (3 * kMlaRows + 8);
  static constexpr uint32_t kBytes = kPagesAt + 4 * 2 * kMlaKeys + 1024;  // with room for alignment

  uint32_t start;
  uint8_t* memory;

  __device__ __forceinline__ uint32_t queries() const { return start; }
  __device__ __forceinline__ uint32_t keys(int buffer) const { return start + kKeysAt + buffer * kBlock; }
  __device__ __forceinline__ uint32_t p(int group) const { return start + kPAt + group * kChunk; }
  __device__ __forceinline__ uint32_t full(int buffer, int chunk) const {
    return start + kBarriersAt + 8 * (buffer * kMlaChunks + chunk);
  }
  __device__ __forceinline__ uint32_t empty(int buffer, int side) const {
    return start + kBarriersAt + 8 * (2 * kMlaChunks + kMlaSides * buffer + side);
  }
  // Row maxima that a consumer sends to the other: the factor of O of each row, and a flag per warp that has
  // raised a maximum. Both consumers share row_maxima().
  __device__ __forceinline__ float* factors(int group) const {
    return reinterpret_cast<float*>(memory + kStateAt) + group * kMlaRows;
  }
  __device__ __forceinline__ float* row_maxima() const { return factors(2); }
  __device__ __forceinline__ volatile int* raised(int group) const {
    return reinterpret_cast<volatile int*>(factors(3)) + 4 * group;
  }

  // Pages of the rows of a pair of blocks, if rows are gathered; -1 after the end.
  __device__ __forceinline__ int32_t* pages() const { return reinterpret_cast<int32_t*>(memory + kPagesAt); }

  __device__ __forceinline__ explicit MlaShared(uint8_t* raw) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(raw));
    start = (at + 1023) & ~1023u;
    memory = raw + (start - at);
  }

  // Runs in one thread.
  __device__ __forceinline__ void init(uint32_t full_arrivals) const {
    for (int i = 0; i < 2 * kMlaChunks; ++i) ptx::mbarrier_init(full(0, i), full_arrivals);
    for (int i = 0; i < 2 * kMlaSides; ++i) ptx::mbarrier_init(empty(0, i), 4);
    ptx::mbarrier_fence_init();
  }
};

// Return the number of pairs of blocks. The last block may be after the end: its keys are zeros and masked.
__device__ __forceinline__ int mla_pairs(const WorkItem& item) {
  const int32_t length = item.kv_end - item.kv_start;
  return length <= 0 ? 1 : (length + 2 * kMlaKeys - 1) / (2 * kMlaKeys);
}

// Return true if the producer gathers rows by cp.async instead of TMA. TMA is slower with boxes of fewer than
// 32 rows. A tensor map needs at least one page and positive strides, but a cache may be empty, and rotary
// keys that a model does not have are one row with stride 0.
inline bool mla_is_gathered(const KvCache& kv) {
  return kv.page_size.divisor % 32 != 0 || kv.num_pages == 0 || kv.k_row == 0 || kv.v_row == 0;
}

}  // namespace flashinfer::cuda::sm90
