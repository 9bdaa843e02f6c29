// Stable counting sort of slots, the (token, expert) pairs, by expert. Each warp counts the slots of each
// expert in its range. A scan turns the counts into first rows, and each warp scatters its slots to them. The
// number of rows stays on the device.
#pragma once

#include <cstdint>

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32;
constexpr int kSlotsPerWarp = 256;         // slots that a warp sorts if several CTAs sort
constexpr int kSmallSort = 4096;           // slots that one CTA sorts
constexpr int64_t kSortBytes = 47 * 1024;  // dynamic smem that needs no opt-in

// Return the number of warps, at most 8, whose counts, `experts + 1` each, fit into kSortBytes. Return 1 also
// if the counts of one warp do not fit.
inline int sort_warps(int experts) {
  const int64_t fits = kSortBytes / (4 * (int64_t{experts} + 1));
  return fits < 1 ? 1 : fits < 8 ? static_cast<int>(fits) : 8;
}

// Call body(slot, expert, rank, same_expert) for slots [begin, end) of a warp, 32 at a time, with all lanes.
// expert is -1 in lanes without a slot. rank counts the earlier slots of the same expert among the 32, and
// `same_expert` has a bit for each lane of that expert.
template <typename Body>
__device__ __forceinline__ void for_slots(const SortParams& p, int64_t begin, int64_t end, const Body& body) {
  const int lane = threadIdx.x % 32;
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t slot = first + lane;
    const int expert = slot < end ? p.expert(slot) : -1;
    const unsigned same_expert = __match_any_sync(kAllLanes, expert);
    body(slot, expert, __popc(same_expert & ((1u << lane) - 1)), same_expert);
    __syncwarp();
  }
}

__device__ __forceinline__ void count_slots(const SortParams& p, int64_t begin, int64_t end, int32_t* counts) {
  for_slots(p, begin, end, [&](int64_t, int expert, int rank, unsigned same_expert) {
    if (expert >= 0 && rank == 0) counts[expert] += __popc(same_expert);
  });
}

// Scatter the slots of a range to their rows. `next` has this warp's next row of each expert.
__device__ __forceinline__ void scatter_slots(const SortParams& p, int64_t begin, int64_t end, int32_t* next) {
  for_slots(p, begin, end, [&](int64_t slot, int expert, int rank, unsigned same_expert) {
    const int32_t row = expert >= 0 ? next[expert] + rank : 0;
    __syncwarp();
    if (expert < 0) return;
    if (rank == 0) next[expert] += __popc(same_expert);
    p.tokens[row] = static_cast<int32_t>(slot / p.top_k);
    p.rows[slot] = expert < p.experts ? row : -1;
  });
}

// Turn counts [ranges, experts + 1] into the first row of each expert in each range, and write indptr. All
// threads of the CTA call this. `partial` has 32 entries.
__device__ __forceinline__ void scan_counts(const SortParams& p, int32_t* counts, int64_t ranges, int32_t* partial) {
  const int buckets = p.experts + 1, threads = blockDim.x, thread = threadIdx.x;
  int32_t before = 0;  // number of slots of the experts of earlier steps
  for (int first = 0; first < buckets; first += threads) {
    const int expert = first + thread;
    int32_t total = 0;
    if (expert < buckets)
      for (int64_t range = 0; range < ranges; ++range) total += counts[range * buckets + expert];
    int32_t inclusive = total;
    for (int by = 1; by < 32; by *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, inclusive, by);
      if (thread % 32 >= by) inclusive += other;
    }
    __syncthreads();
    if (thread % 32 == 31) partial[thread / 32] = inclusive;
    __syncthreads();
    int32_t row = before + inclusive - total, slots_of_step = 0;
    for (int warp = 0; warp < threads / 32; ++warp) {
      if (warp < thread / 32) row += partial[warp];
      slots_of_step += partial[warp];
    }
    before += slots_of_step;
    if (expert < buckets) {
      p.indptr[expert] = row;
      for (int64_t range = 0; range < ranges; ++range) {
        const int32_t count = counts[range * buckets + expert];
        counts[range * buckets + expert] = row;
        row += count;
      }
    }
  }
}

__device__ __forceinline__ void clear_counts(int32_t* counts, int64_t number) {
  for (int64_t i = threadIdx.x; i < number; i += blockDim.x) counts[i] = 0;
}

// Sort few slots in one CTA. Each of its first `warps` warps has one range.
inline __global__ void __launch_bounds__(kSortThreads) sort_small_kernel(const SortParams p, int warps) {
  extern __shared__ int32_t counts[];
  __shared__ int32_t partial[kSortWarps];
  const int warp = threadIdx.x / 32, buckets = p.experts + 1;
  clear_counts(counts, int64_t{warps} * buckets);
  wait_for_inputs();
  launch_dependents();
  __syncthreads();
  const int64_t slots_per_warp = (p.slots + warps - 1) / warps, begin = warp * slots_per_warp;
  const int64_t end = begin + slots_per_warp < p.slots ? begin + slots_per_warp : p.slots;
  if (warp < warps) count_slots(p, begin, end, counts + warp * buckets);
  __syncthreads();
  scan_counts(p, counts, warps, partial);
  __syncthreads();
  if (warp < warps) scatter_slots(p, begin, end, counts + warp * buckets);
}

inline __global__ void count_slots_kernel(const SortParams p) {
  extern __shared__ int32_t counts[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, buckets = p.experts + 1;
  clear_counts(counts, int64_t{warps} * buckets);
  wait_for_inputs();
  launch_dependents();
  __syncthreads();
  const int64_t range = int64_t{blockIdx.x} * warps + warp, begin = range * kSlotsPerWarp;
  const int64_t end = begin + kSlotsPerWarp < p.slots ? begin + kSlotsPerWarp : p.slots;
  count_slots(p, begin, end, counts + warp * buckets);
  __syncwarp();
  for (int expert = threadIdx.x % 32; begin < p.slots && expert < buckets; expert += 32)
    p.workspace[range * buckets + expert] = counts[warp * buckets + expert];
}

inline __global__ void __launch_bounds__(kSortThreads) scan_slots_kernel(const SortParams p, int64_t ranges) {
  __shared__ int32_t partial[kSortWarps];
  wait_for_inputs();
  launch_dependents();
  scan_counts(p, p.workspace, ranges, partial);
}

inline __global__ void scatter_slots_kernel(const SortParams p) {
  extern __shared__ int32_t counts[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, buckets = p.experts + 1;
  wait_for_inputs();
  launch_dependents();
  const int64_t range = int64_t{blockIdx.x} * warps + warp, begin = range * kSlotsPerWarp;
  const int64_t end = begin + kSlotsPerWarp < p.slots ? begin + kSlotsPerWarp : p.slots;
  if (begin >= end) return;
  for (int expert = threadIdx.x % 32; expert < buckets; expert += 32)
    counts[warp * buckets + expert] = p.workspace[range * buckets + expert];
  __syncwarp();
  scatter_slots(p, begin, end, counts + warp * buckets);
}

inline int64_t sort_ranges(int64_t slots) { return (slots + kSlotsPerWarp - 1) / kSlotsPerWarp; }

inline void sort_slots(const SortParams& p, const Launch& where) {
  const int warps = sort_warps(p.experts);
  const int64_t bytes = int64_t{4} * warps * (p.experts + 1);
  if (p.slots <= kSmallSort) return Kernel<sort_small_kernel>::launch(1, kSortThreads, bytes, where, p, warps);
  const int64_t ranges = sort_ranges(p.slots);
  const auto blocks = static_cast<unsigned>((ranges + warps - 1) / warps);
  Kernel<count_slots_kernel>::launch(blocks, 32 * warps, bytes, where, p);
  launch(scan_slots_kernel, 1, kSortThreads, where, p, ranges);
  Kernel<scatter_slots_kernel>::launch(blocks, 32 * warps, bytes, where, p);
}

}  // namespace flashinfer::cuda
