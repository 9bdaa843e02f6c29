// Which work a block does: a warp hands its items out to the others, some of them ahead, so that nobody waits for the
// memory that holds them.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/gather.cuh>
#include <flashinfer/cuda/attention/sm90/shape.cuh>

namespace flashinfer::cuda::sm90 {

// The part of an item's keys that its rows may see at all.
template <typename S>
FLASHINFER_HD void find_keys(const AttentionParams& params, Work& work) {
  const Mask mask(params, work);
  const auto group = static_cast<int32_t>(params.group.divisor);
  const int32_t last_row = min(work.row_start + params.tile_rows, work.qo_len * group) - 1;
  work.kv_start = max(work.kv_start, mask.begin(static_cast<int32_t>(params.group.div(work.row_start))));
  work.kv_end = min(work.kv_end, mask.end(static_cast<int32_t>(params.group.div(last_row))));
  // Copies of pages start at multiples of their keys. Pages of keys that nobody sees may be nobody's.
  work.first_key = is_gathered(params.kv) ? work.kv_start : work.kv_start / kPageKeys * kPageKeys;
  work.tiles = work.kv_end > work.kv_start ? (work.kv_end - work.first_key + S::kKeys - 1) / S::kKeys : 0;
}

// Which numbers of a list a block takes. The list has `sections` equal parts, in each of which longer items come first,
// and is gone through in turns of one number for each block. Every second turn goes backwards, and a turn starts at the
// block behind the one where the turn before ended: what blocks have to do differs by 2.5 % in the mean.
struct Turns {
  int32_t section, blocks, block, sections;  // section: numbers of one
  int32_t turns, last;                       // of a section; numbers of its last turn
  int32_t first = 0, at = 0, turn = 0;       // first: the block that starts; at: the section; turn: of all

  FLASHINFER_HD Turns(int32_t section_, int32_t sections_, int32_t block_, int32_t blocks_)
      : section(section_), blocks(blocks_), block(block_), sections(sections_) {
    turns = (section + blocks - 1) / blocks, last = section - (turns - 1) * blocks;
  }

  // False where there is no more.
  FLASHINFER_HD bool next(int32_t& number) {
    while (section > 0 && at < sections) {
      const int32_t turn_of_section = turn - at * turns;
      const bool is_last = turn_of_section == turns - 1, backwards = turn % 2 != 0;
      const int32_t length = is_last ? last : blocks;
      const int32_t place = block >= first ? block - first : block - first + blocks;
      number = at * section + turn_of_section * blocks + (backwards ? length - 1 - place : place);
      ++turn;
      if (is_last) ++at, first = (first + last) % blocks;
      if (place < length) return true;
    }
    return false;
  }
};

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

// One lane.
template <typename S>
__device__ __forceinline__ void hand_out_work(const AttentionParams& params, int heads_together,
                                              const Shared<S>& shared) {
  const typename S::WorkRing ring = shared.work_ring();
  const int32_t items = params.num_items();
  Turns turns(items * heads_together, params.num_kv_heads / heads_together, static_cast<int32_t>(blockIdx.x),
              static_cast<int32_t>(gridDim.x));
  int32_t number;
  for (int use = 0;; ++use) {
    Work work{};
    work.tiles = -1;
    if (turns.next(number)) {
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
