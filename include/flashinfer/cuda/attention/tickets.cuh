// Merges in the kernel that computes the partial states. A CTA that has written its partial state takes a
// ticket of its tile and KV head. The CTA with the last ticket merges all partial states, which are in the L2
// cache. This saves the launch of a merge kernel, and the wait for the end of all CTAs of this kernel.
//
// The ticket counters are stored after the lists of a plan, and are 0 when they are copied to the device. The
// last CTA resets the counter to 0, so that a graph may be replayed. Partial states are merged in the order
// of their slots, whichever CTA is last: results have equal bits in every run.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/merge.cuh>
#include <flashinfer/cuda/ptx/atomic.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

// Return the merge of a slot, found by a whole warp; -1: no slot, or no plan.
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

// Merge the rows of a tile. Runs in all threads of a CTA.
template <typename Variant, typename Types, int kThreads, typename P>
__device__ __forceinline__ void merge_tile(const P& params, const MergeItem& item, int32_t number, int32_t head) {
  constexpr int kColumns = Types::HEAD_DIM_VO / 4, kAtOnce = 16;
  const int32_t rows = item.qo_len * static_cast<int32_t>(params.group.divisor) - item.row_start;
  const uint32_t first = (static_cast<uint32_t>(number) * params.num_kv_heads + head) * params.slot_rows;
  for (int i = threadIdx.x; i < min(rows, params.slot_rows) * kColumns; i += kThreads) {
    MergeRow row;
    if (!row.find(params, item, first + i / kColumns)) continue;
    PartialState<Variant::use_softmax> merged;
    add_states<Types::HEAD_DIM_VO, kAtOnce>(params, row, 0, 1, i % kColumns, merged);
    write_merged<Variant, Types>(params, row, i % kColumns, merged);
  }
}

// Take a ticket after this CTA's partial state is written, and merge after the last one. `number` is the
// result of merge_of_slot(). Runs in all threads of a CTA.
template <typename Variant, typename Types, int kThreads, typename P>
__device__ __forceinline__ void merge_if_last(const P& params, int32_t number, int32_t head) {
  if (number < 0) return;
  const MergeItem item = params.merges[number];
  const auto last = static_cast<uint32_t>(item.num_slots) - 1;
  __syncthreads();  // all threads have written the partial state
  bool is_last = false;
  if (threadIdx.x == 0)
    is_last = ptx::atomic_inc_acq_rel(params.tickets + int64_t{number} * params.num_kv_heads + head, last) == last;
  if (__syncthreads_or(is_last)) merge_tile<Variant, Types, kThreads>(params, item, number, head);
}

}  // namespace flashinfer::cuda
