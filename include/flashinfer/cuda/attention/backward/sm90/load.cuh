// The warps that compute nothing: one brings tiles into shared memory, one takes sums of queries' gradients out of it.
#pragma once

#include <cstdint>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/sm90/shape.cuh>
#include <flashinfer/cuda/attention/backward/sm90/work.cuh>
#include <flashinfer/cuda/ptx/atomic.cuh>
#include <flashinfer/cuda/ptx/mbarrier.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>

namespace flashinfer::cuda::sm90 {

// By one thread.
template <typename S>
struct BackwardLoad {
  const PrefillBackwardParams& params;
  const BackwardTable& table;
  const BackwardMaps& maps;
  const BackwardMemory& memory;
  const BackwardShared<S>& shared;

  __device__ __forceinline__ void run() const {
    const int64_t pieces = backward_pieces(params, memory);
    const typename S::WorkRing works = shared.work_ring();
    for (int use = 0, key_use = 0, query_use = 0;; ++use) {
      const uint32_t number = atomicAdd(memory.taken, 1);
      works.wait_empty(use);
      BackwardWork& work = shared.work(use);
      if (number >= pieces) {
        work.steps = -1;
        works.arrive_full(use);
        return;
      }
      work = find_backward_work<S>(params, table, number);
      works.arrive_full(use);
      if (work.steps == 0) continue;
      BackwardWalk walk(work);
      for (int32_t step = 0; step < work.steps; ++step, ++query_use, walk.advance()) {
        load_queries(walk, query_use);
        if (step == 0) load_keys(work, key_use++);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_queries(const BackwardWalk& walk, int use) const {
    const typename S::QueryRing queries = shared.query_ring(), grads = shared.grad_ring();
    const int32_t token = walk.work.qo_start + walk.tile * S::kQueries;
    const int64_t number = memory.number(walk.head, walk.work.numbered_from + walk.tile);
    queries.wait_empty(use);
    ptx::mbarrier_arrive_expect_tx(queries.full(use), S::kQueryBytes + S::kRowBytes);
    for (int c = 0; c < S::kChunks; ++c)
      ptx::tma_load(shared.queries(use) + c * S::Queries::kChunkBytes, &maps.q, queries.full(use), 64 * c, token,
                    walk.head);
    ptx::bulk_load(shared.rows(use), memory.rows + number * (2 * S::kQueries), S::kRowBytes, queries.full(use));
    grads.wait_empty(use);
    ptx::mbarrier_arrive_expect_tx(grads.full(use), S::kQueryBytes);
    for (int c = 0; c < S::kChunks; ++c)
      ptx::tma_load(shared.grads(use) + c * S::Queries::kChunkBytes, &maps.grad, grads.full(use), 64 * c, token,
                    walk.head);
  }

  __device__ __forceinline__ void load_keys(const BackwardWork& work, int use) const {
    const typename S::KeyRing keys = shared.key_ring();
    const int32_t token = work.kv_start + work.tile * S::kKeys;
    keys.wait_empty(use);
    ptx::mbarrier_arrive_expect_tx(keys.full(use), 2 * S::kKeyBytes);
    for (int c = 0; c < S::kChunks; ++c) {
      ptx::tma_load(shared.keys() + c * S::Keys::kChunkBytes, &maps.k, keys.full(use), 64 * c, token, work.kv_head);
      ptx::tma_load(shared.values() + c * S::Keys::kChunkBytes, &maps.v, keys.full(use), 64 * c, token, work.kv_head);
    }
  }
};

// Adds this block's part of each tile of queries when it is its turn: the tiles of keys before have added theirs. By
// one thread.
template <typename S>
__device__ __forceinline__ void add_sums(const BackwardMemory& memory, const BackwardShared<S>& shared) {
  const typename S::WorkRing works = shared.work_ring();
  const typename S::SumRing sums = shared.sum_ring();
  for (int use = 0, sum_use = 0;; ++use) {
    works.wait_full(use);
    const BackwardWork& work = shared.work(use);
    if (work.steps < 0) return;
    const auto turn = static_cast<uint32_t>(work.tile);
    BackwardWalk walk(work);
    for (int32_t step = 0; step < work.steps; ++step, ++sum_use, walk.advance()) {
      const int64_t number = memory.number(walk.head, work.numbered_from + walk.tile);
      float* to = memory.sums + number * (S::kSumBytes / 4);
      sums.wait_full(sum_use);
      while (ptx::load_acquire(memory.turns + number) != turn) {
      }
      ptx::fence_proxy_async_global();
      if (turn == 0) {
        ptx::bulk_store(to, shared.sums(sum_use), S::kSumBytes);
      } else {
        ptx::bulk_add(to, shared.sums(sum_use), S::kSumBytes);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      sums.release(sum_use);
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async_global();
      ptx::store_release(memory.turns + number, turn + 1);
    }
    works.release(use);
  }
}

}  // namespace flashinfer::cuda::sm90
