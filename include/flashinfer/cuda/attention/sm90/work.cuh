// Which work a block does: a warp hands its items out to the others, some of them ahead, so that nobody waits for the
// memory that holds them.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/shape.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kPageKeys = 16;  // keys that one copy brings where the cache is paged

// The part of an item's keys that its rows may see at all.
template <typename S>
__device__ __forceinline__ void find_keys(const AttentionParams& params, Work& work) {
  const Mask mask(params, work);
  const auto group = static_cast<int32_t>(params.group.divisor);
  const int32_t last_row = min(work.row_start + params.tile_rows, work.qo_len * group) - 1;
  work.kv_start = max(work.kv_start, mask.begin(static_cast<int32_t>(params.group.div(work.row_start))));
  work.kv_end = min(work.kv_end, mask.end(static_cast<int32_t>(params.group.div(last_row))));
  // Copies of pages start at multiples of their keys.
  work.first_key = work.kv_start / kPageKeys * kPageKeys;
  work.tiles = work.kv_end > work.kv_start ? (work.kv_end - work.first_key + S::kKeys - 1) / S::kKeys : 0;
}

// Item and head number `number` of all. All items of `heads_together` heads come first, the heads of an item next to
// each other; then those of other heads.
__device__ __forceinline__ WorkItem item_of(const AttentionParams& params, int heads_together, int32_t items,
                                            int32_t number, int32_t& head) {
  const int32_t of_section = items * heads_together, section = number / of_section, rest = number % of_section;
  const int32_t index = rest / heads_together;
  head = section * heads_together + rest % heads_together;
  // Without a plan the last tile comes first: with a causal mask it sees the most.
  return params.item(params.items ? index : items - 1 - index);
}

// One lane. Longer items come first; blocks take them in turns, the last block of a turn being the first of the next.
template <typename S>
__device__ __forceinline__ void hand_out_work(const AttentionParams& params, int heads_together,
                                              const Shared<S>& shared) {
  const typename S::WorkRing ring = shared.work_ring();
  const int32_t items = params.num_items(), all = items * params.num_kv_heads;
  const auto block = static_cast<int32_t>(blockIdx.x), blocks = static_cast<int32_t>(gridDim.x);
  for (int use = 0;; ++use) {
    const int32_t number = use * blocks + (use % 2 == 0 ? block : blocks - 1 - block);
    Work work{};
    work.tiles = -1;
    if (number < all) {
      static_cast<WorkItem&>(work) = item_of(params, heads_together, items, number, work.head);
      work.first_row = params.kv.indptr ? params.kv.indptr[work.batch] : 0;
      find_keys<S>(params, work);
    }
    ring.wait_empty(use);
    shared.work(use) = work;
    ring.arrive_full(use);
    if (work.tiles < 0) return;
  }
}

}  // namespace flashinfer::cuda::sm90
