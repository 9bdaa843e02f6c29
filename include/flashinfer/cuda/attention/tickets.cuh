// Merging the parts of a tile in the kernel that computes them. Each block that has written a part takes a ticket of
// its tile and key head; the block with the last one finds all parts in the L2 cache and puts them together. That
// spares the launch of another kernel and the wait for the end of all blocks of this one.
//
// Tickets lie behind the lists of a plan, 0 when they are copied there; the last one sets the counter to 0 again, so
// that a graph may be replayed. Parts are added in the order of their slots, whoever comes last: results have the same
// bits in every run.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/merge.cuh>
#include <flashinfer/cuda/ptx/atomic.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

// Which merge has a slot, found by the lanes of a warp together; -1: the slot is none, or there is no plan.
__device__ __forceinline__ int32_t merge_of_slot(const AttentionParams& params, int32_t slot) {
  if (slot < 0 || params.tickets == nullptr) return -1;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, count = params.counts[1];
  int32_t found = -1;
#pragma unroll 4
  for (int32_t i = lane; i < count; i += 32) {
    const int32_t first = params.merges[i].first_slot;
    if (slot >= first && slot - first < params.merges[i].num_slots) found = i;
  }
  return __reduce_max_sync(kAllLanes, found);
}

// By all threads of a block, after its part was written; `number` as merge_of_slot() returned it. Shared memory of
// before is used again.
template <typename Variant, typename Types, int kThreads, typename P>
__device__ __forceinline__ void merge_if_last(const P& params, int32_t number, int32_t head, uint8_t* shared) {
  if (number < 0) return;
  const MergeItem item = params.merges[number];
  const auto last = static_cast<uint32_t>(item.num_slots) - 1;
  __syncthreads();  // the part is written, by all threads
  bool is_last = false;
  if (threadIdx.x == 0)
    is_last = ptx::atomic_inc_acq_rel(params.tickets + int64_t{number} * params.num_kv_heads + head, last) == last;
  if (!__syncthreads_or(is_last)) return;
  const int rows = item.qo_len * static_cast<int32_t>(params.group.divisor) - item.row_start;
  const uint32_t first = (static_cast<uint32_t>(number) * params.num_kv_heads + head) * params.slot_rows;
  merge_rows<16, Variant>(params, item, first, min(rows, params.slot_rows),
                          *reinterpret_cast<MergeShape<Types, kThreads>*>(shared));
}

}  // namespace flashinfer::cuda
