// Scheduler of a persistent CTA: one warp writes work items into a ring, ahead of their use.
#pragma once

#include <cstdint>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/gather.cuh>
#include <flashinfer/cuda/attention/sm90/shape.cuh>

namespace flashinfer::cuda::sm90 {

// Restrict an item's keys to those that its rows may see.
template <typename S>
FLASHINFER_HD void find_keys(const AttentionParams& params, Work& work) {
  const Mask mask(params, work);
  const auto group = static_cast<int32_t>(params.group.divisor);
  const int32_t last_row = min(work.row_start + params.tile_rows, work.qo_len * group) - 1;
  work.kv_start = max(work.kv_start, mask.begin(static_cast<int32_t>(params.group.div(work.row_start))));
  work.kv_end = min(work.kv_end, mask.end(static_cast<int32_t>(params.group.div(last_row))));
  // Copies from pages start at multiples of kPageKeys. Pages before them may not exist: no row sees their
  // keys.
  work.first_key = is_gathered(params.kv) ? work.kv_start : work.kv_start / kPageKeys * kPageKeys;
  work.tiles = work.kv_end > work.kv_start ? (work.kv_end - work.first_key + S::kKeys - 1) / S::kKeys : 0;
}

// Assign the numbers of a list to CTAs. The list has `sections` equal sections, each with its longest items
// first. A round assigns one number to each CTA, and every second round runs backwards. A section starts at
// the CTA after the last one of the previous section:
//   5 CTAs, sections of 9 numbers:    CTA 0   1   2   3   4
//     section 0, round 0, forwards       0   1   2   3   4
//                round 1, backwards      8   7   6   5   -
//     section 1, round 0, forwards      10  11  12  13   9
//                round 1, backwards     16  15  14   -  17
// CTAs differ by 2.5 % of the mean work.
struct SnakeSchedule {
  int32_t section_size, sections, cta, ctas;
  int32_t rounds, last_length;     // of a section; numbers of its last round
  int32_t first_cta = 0;           // CTA of the section's first number
  int32_t section = 0, round = 0;  // round counts over all sections

  FLASHINFER_HD SnakeSchedule(int32_t section_size_, int32_t sections_, int32_t cta_, int32_t ctas_)
      : section_size(section_size_), sections(sections_), cta(cta_), ctas(ctas_) {
    rounds = (section_size + ctas - 1) / ctas;
    last_length = section_size - (rounds - 1) * ctas;
  }

  // Set the next number. Return false after the last.
  FLASHINFER_HD bool next(int32_t& number) {
    while (section_size > 0 && section < sections) {
      const int32_t round_of_section = round - section * rounds;
      const bool is_last = round_of_section == rounds - 1, backwards = round % 2 != 0;
      const int32_t length = is_last ? last_length : ctas;
      const int32_t index = cta >= first_cta ? cta - first_cta : cta - first_cta + ctas;
      number = section * section_size + round_of_section * ctas + (backwards ? length - 1 - index : index);
      ++round;
      if (is_last) ++section, first_cta = (first_cta + last_length) % ctas;
      if (index < length) return true;
    }
    return false;
  }
};

// Return the item and the head of a number. A section has all items of `heads_per_section` heads, and the
// heads of an item are adjacent.
__device__ __forceinline__ WorkItem item_of(const AttentionParams& params, int heads_per_section, int32_t items,
                                            int32_t number, int32_t& head) {
  const int32_t section_size = items * heads_per_section, section = number / section_size, rest = number % section_size;
  const int32_t index = rest / heads_per_section;
  head = section * heads_per_section + rest % heads_per_section;
  // Without a plan the last tile comes first: with a causal mask it sees the most keys.
  return params.item(params.items ? index : items - 1 - index);
}

// The scheduler: write all work items of the CTA into the ring, then an end mark. Runs in one lane.
template <typename S>
__device__ __forceinline__ void schedule_tiles(const AttentionParams& params, int heads_per_section,
                                               const Shared<S>& shared) {
  const typename S::WorkRing ring = shared.work_ring();
  const int32_t items = params.num_items();
  SnakeSchedule schedule(items * heads_per_section, params.num_kv_heads / heads_per_section,
                         static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x));
  int32_t number;
  for (int use = 0;; ++use) {
    Work work{};
    work.tiles = -1;
    if (schedule.next(number)) {
      static_cast<WorkItem&>(work) = item_of(params, heads_per_section, items, number, work.head);
      work.kv_begin = params.kv.indptr ? params.kv.indptr[work.batch] : 0;
      find_keys<S>(params, work);
    }
    ring.wait_empty(use);
    shared.work(use) = work;
    ring.arrive_full(use);
    if (work.tiles < 0) return;
  }
}

}  // namespace flashinfer::cuda::sm90
