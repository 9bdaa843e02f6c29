// The warps of the producer warpgroup: one loads tiles into shared memory, one adds dQ to global memory.
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

// Load all tiles of the CTA. Runs in one thread.
template <typename S>
struct BackwardLoad {
  const PrefillBackwardParams& params;
  const BackwardTable& table;
  const BackwardMaps& maps;
  const BackwardMemory& memory;
  const BackwardShared<S>& shared;

  __device__ __forceinline__ void run() const {
    const int64_t items = backward_items(params, memory);
    const typename S::WorkRing work_ring = shared.work_ring();
    for (int use = 0, key_use = 0, query_use = 0;; ++use) {
      const uint32_t work_index = atomicAdd(memory.next_work, 1);
      work_ring.wait_empty(use);
      BackwardWork& work = shared.work(use);
      if (work_index >= items) {
        work.steps = -1;
        work_ring.arrive_full(use);
        return;
      }
      work = find_backward_work<S>(params, table, work_index);
      work_ring.arrive_full(use);
      if (work.steps == 0) continue;
      QueryTileCursor cursor(work);
      for (int32_t step = 0; step < work.steps; ++step, ++query_use, cursor.advance()) {
        load_queries(cursor, query_use);
        if (step == 0) load_keys(work, key_use++);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_queries(const QueryTileCursor& cursor, int use) const {
    const typename S::QueryRing queries = shared.query_ring(), grads = shared.grad_ring();
    const int32_t token = cursor.work.qo_start + cursor.tile * S::kQueries;
    const int64_t tile_index = memory.number(cursor.head, cursor.work.request_query_tile + cursor.tile);
    queries.wait_empty(use);
    ptx::mbarrier_arrive_expect_tx(queries.full(use), S::kQueryBytes + S::kRowBytes);
    for (int c = 0; c < S::kChunks; ++c)
      ptx::tma_load(shared.queries(use) + c * S::Queries::kChunkBytes, &maps.q, queries.full(use), 64 * c, token,
                    cursor.head);
    ptx::bulk_load(shared.rows(use), memory.rows + tile_index * (2 * S::kQueries), S::kRowBytes, queries.full(use));
    grads.wait_empty(use);
    ptx::mbarrier_arrive_expect_tx(grads.full(use), S::kQueryBytes);
    for (int c = 0; c < S::kChunks; ++c)
      ptx::tma_load(shared.grads(use) + c * S::Queries::kChunkBytes, &maps.grad, grads.full(use), 64 * c, token,
                    cursor.head);
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

// Add this CTA's part to each tile of dQ after all lower-numbered tiles of keys have added theirs. Runs in
// one thread.
template <typename S>
__device__ __forceinline__ void add_sums(const BackwardMemory& memory, const BackwardShared<S>& shared) {
  const typename S::WorkRing work_ring = shared.work_ring();
  const typename S::SumRing sums = shared.sum_ring();
  for (int use = 0, sum_use = 0;; ++use) {
    work_ring.wait_full(use);
    const BackwardWork& work = shared.work(use);
    if (work.steps < 0) return;
    const auto order = static_cast<uint32_t>(work.tile);
    QueryTileCursor cursor(work);
    for (int32_t step = 0; step < work.steps; ++step, ++sum_use, cursor.advance()) {
      const int64_t tile_index = memory.number(cursor.head, work.request_query_tile + cursor.tile);
      float* to = memory.sums + tile_index * (S::kSumBytes / 4);
      sums.wait_full(sum_use);
      while (ptx::load_acquire(memory.added + tile_index) != order) {
      }
      ptx::fence_proxy_async_global();
      if (order == 0) {
        ptx::bulk_store(to, shared.sums(sum_use), S::kSumBytes);
      } else {
        ptx::bulk_add(to, shared.sums(sum_use), S::kSumBytes);
      }
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      sums.release(sum_use);
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async_global();
      ptx::store_release(memory.added + tile_index, order + 1);
    }
    work_ring.release(use);
  }
}

}  // namespace flashinfer::cuda::sm90
