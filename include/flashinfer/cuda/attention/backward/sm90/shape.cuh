// Shapes of the Hopper kernel of attention's gradients, and a CTA's shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/tile/descriptor.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda::sm90 {

// A work item: the gradients of a tile of keys from `steps` tiles of queries. The tiles of each head are
// taken from the last to the first.
struct BackwardWork {
  int32_t steps;  // negative: no more work
  int32_t qo_start, qo_len, kv_start, kv_len;
  int32_t tile, kv_head, part;                 // of keys
  int32_t query_head, query_tile;              // of the first step
  int32_t query_tiles_begin, query_tiles_end;  // the tiles of a head that see the keys
  int32_t request_query_tile;                  // the entry's first_query_tile
};

template <typename T_, int kDim_>
struct BackwardShape {
  using T = T_;
  static constexpr int kDim = kDim_, kKeys = 128, kQueries = 8192 / kDim;
  static constexpr int kConsumers = 2, kWarps = 4 * kConsumers;  // consumers, with 64 keys each
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kChunks = kDim / 64;
  static_assert(kDim == 64 || kDim == 128, "a warpgroup has 64 x 64 of the gradient of a tile of queries");

  using Keys = ChunkedTile<kKeys>;        // and values; also dS: chunks of 64 queries, rows are keys
  using Queries = ChunkedTile<kQueries>;  // and dO
  static constexpr int kKeyBytes = kKeys * kDim * 2, kQueryBytes = kQueries * kDim * 2;
  static constexpr int kLogitBytes = kKeys * kQueries * 2, kSumBytes = kQueries * kDim * 4;
  static constexpr int kRowBytes = kQueries * 8;  // the lse of each row, then the delta of each
  static constexpr int kStages = 2, kSumStages = kDim == 128 ? 2 : 1;
  using KeyRing = Ring<1>;
  using QueryRing = Ring<kStages>;
  using LogitRing = Ring<2>;
  using SumRing = Ring<kSumStages>;
  using WorkRing = Ring<2>;

  // Shared memory, in this order. All parts except the rows start at multiples of 1024.
  static constexpr int kValuesAt = kKeyBytes, kQueriesAt = 2 * kKeyBytes;
  static constexpr int kGradsAt = kQueriesAt + kStages * kQueryBytes, kLogitsAt = kGradsAt + kStages * kQueryBytes;
  static constexpr int kSumsAt = kLogitsAt + 2 * kLogitBytes, kRowsAt = kSumsAt + kSumStages * kSumBytes;
  static constexpr int kSharedBytes = kRowsAt + kStages * kRowBytes + 1024;  // the start is rounded up
};

// Static shared memory. It is empty without code for 9.0a, which the launch detects.
template <typename S>
struct BackwardBarriers {
  uint64_t barriers[(S::KeyRing::kBytes + 2 * S::QueryRing::kBytes + S::LogitRing::kBytes + S::SumRing::kBytes +
                     S::WorkRing::kBytes) /
                    8];
  BackwardWork work[S::WorkRing::kStages];
};

template <typename S>
struct BackwardShared {
  uint32_t start;  // a multiple of 1024
  uint32_t barriers;
  BackwardWork* works;

  __device__ __forceinline__ BackwardShared(const uint8_t* raw, BackwardBarriers<S>& small)
      : start((static_cast<uint32_t>(__cvta_generic_to_shared(raw)) + 1023) & ~1023u),
        barriers(static_cast<uint32_t>(__cvta_generic_to_shared(small.barriers))),
        works(small.work) {}

  __device__ __forceinline__ uint32_t keys() const { return start; }
  __device__ __forceinline__ uint32_t values() const { return start + S::kValuesAt; }
  __device__ __forceinline__ uint32_t queries(int use) const {
    return start + S::kQueriesAt + S::QueryRing::stage(use) * S::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t grads(int use) const {
    return start + S::kGradsAt + S::QueryRing::stage(use) * S::kQueryBytes;
  }
  __device__ __forceinline__ uint32_t logits(int use) const {
    return start + S::kLogitsAt + S::LogitRing::stage(use) * S::kLogitBytes;
  }
  __device__ __forceinline__ uint32_t sums(int use) const {
    return start + S::kSumsAt + S::SumRing::stage(use) * S::kSumBytes;
  }
  __device__ __forceinline__ uint32_t rows(int use) const {
    return start + S::kRowsAt + S::QueryRing::stage(use) * S::kRowBytes;
  }
  __device__ __forceinline__ BackwardWork& work(int use) const { return works[S::WorkRing::stage(use)]; }

  __device__ __forceinline__ typename S::KeyRing key_ring() const { return {barriers}; }
  __device__ __forceinline__ typename S::QueryRing query_ring() const { return {barriers + S::KeyRing::kBytes}; }
  __device__ __forceinline__ typename S::QueryRing grad_ring() const {
    return {query_ring().barriers + S::QueryRing::kBytes};
  }
  __device__ __forceinline__ typename S::LogitRing logit_ring() const {
    return {grad_ring().barriers + S::QueryRing::kBytes};
  }
  __device__ __forceinline__ typename S::SumRing sum_ring() const {
    return {logit_ring().barriers + S::LogitRing::kBytes};
  }
  __device__ __forceinline__ typename S::WorkRing work_ring() const {
    return {sum_ring().barriers + S::SumRing::kBytes};
  }

  // Runs in one thread, before __syncthreads(). One lane of each warp arrives.
  __device__ __forceinline__ void init() const {
    key_ring().init(1, S::kWarps);
    query_ring().init(1, S::kWarps);
    grad_ring().init(1, S::kWarps);
    logit_ring().init(S::kWarps, 1);  // no empty barrier is waited for: see BackwardTile
    sum_ring().init(S::kWarps, 1);
    work_ring().init(1, S::kWarps + 1);
    ptx::mbarrier_fence_init();
  }
};

struct BackwardMaps {
  CUtensorMap q, k, v, grad;
};

}  // namespace flashinfer::cuda::sm90
