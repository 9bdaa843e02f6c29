// The schedule of the Hopper kernel of attention's gradients: the order of tiles of keys, and the tiles of
// queries that each of them sees.
#pragma once

#include <cstdint>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/attention/backward/sm90/shape.cuh>

namespace flashinfer::cuda::sm90 {

// The layout of p.memory, which the kernels share.
struct BackwardMemory {
  uint32_t* next_work;  // number of tiles of keys that CTAs have taken
  uint32_t* added;      // per head and tile of queries: number of tiles of keys that have added to dQ
  float* rows;          // per head and tile of queries: the lse of each row, then the delta of each
  float* sums;          // per head and tile of queries: dQ, in the register order of two warpgroups
  int32_t query_tiles, key_tiles;

  __device__ __forceinline__ int64_t number(int32_t head, int32_t tile) const {
    return int64_t{head} * query_tiles + tile;
  }
};

// Return the number of work items. In a request, the first tiles of keys of all heads come first: with a
// causal mask they see the most queries. A tile of keys waits for lower tiles of its head, which CTAs have
// already started, because items are taken in rising order.
__device__ __forceinline__ int64_t backward_items(const PrefillBackwardParams& p, const BackwardMemory& memory) {
  return int64_t{memory.key_tiles} * p.num_kv_heads * p.splits;
}

template <typename S>
__device__ __forceinline__ BackwardWork find_backward_work(const PrefillBackwardParams& p, const BackwardTable& table,
                                                           uint32_t number) {
  const auto each = static_cast<uint32_t>(p.num_kv_heads * p.splits);
  const auto slot = static_cast<int32_t>(number % each);
  auto tile = static_cast<int32_t>(number / each);
  const BackwardEntry& entry = table.find(tile);
  BackwardWork work{};
  work.qo_start = entry.qo_start, work.qo_len = entry.qo_len, work.kv_start = entry.kv_start,
  work.kv_len = entry.kv_len;
  work.tile = tile, work.kv_head = slot / p.splits, work.part = slot % p.splits;
  work.request_query_tile = entry.first_query_tile;
  const BackwardMask mask(p, entry);
  int32_t begin, end;
  mask.columns<true>(work.tile * S::kKeys, min((work.tile + 1) * S::kKeys, entry.kv_len) - 1, begin, end);
  work.query_tiles_begin = begin / S::kQueries, work.query_tiles_end = (end + S::kQueries - 1) / S::kQueries;
  const int32_t of_head = work.query_tiles_end - work.query_tiles_begin, group = p.num_qo_heads / p.num_kv_heads;
  if (begin >= end) return work;
  const int64_t all = int64_t{of_head} * group, skipped = all * work.part / p.splits;
  work.steps = static_cast<int32_t>(all * (work.part + 1) / p.splits - skipped);
  work.query_head = work.kv_head * group + static_cast<int32_t>(skipped / of_head);
  work.query_tile = work.query_tiles_end - 1 - static_cast<int32_t>(skipped % of_head);
  return work;
}

// The tiles of queries of a work item, in order.
struct QueryTileCursor {
  const BackwardWork& work;
  int32_t head, tile;

  __device__ __forceinline__ explicit QueryTileCursor(const BackwardWork& all)
      : work(all), head(all.query_head), tile(all.query_tile) {}
  __device__ __forceinline__ void advance() {
    if (--tile < work.query_tiles_begin) tile = work.query_tiles_end - 1, ++head;
  }
};

}  // namespace flashinfer::cuda::sm90
