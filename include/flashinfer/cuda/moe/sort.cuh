// Stable sort of slots by expert on CUDA: each warp counts the experts of a range of slots, the counts become
// first rows, and each warp writes its slots there. The number of rows stays on the device.
#pragma once

#include <cstdint>

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32;
constexpr int kSlotsOfWarp = 256;          // if several CTAs sort
constexpr int kSmallSort = 4096;           // slots that one CTA sorts
constexpr int64_t kSortBytes = 47 * 1024;  // shared memory that needs no opt-in

// Return the number of warps whose counts of `experts + 1` experts fit into shared memory.
inline int sort_warps(int experts) {
  const int64_t fits = kSortBytes / (4 * (int64_t{experts} + 1));
  return fits < 1 ? 1 : fits < 8 ? static_cast<int>(fits) : 8;
}

// Call body(slot, expert, rank, same) for slots [begin, end) of a warp, 32 at a time, with all lanes. expert
// is -1 in lanes without a slot. rank counts the earlier slots of the same expert among the 32, and `same`
// are the lanes of that expert.
template <typename Body>
__device__ __forceinline__ void each_slot(const SortParams& p, int64_t begin, int64_t end, const Body& body) {
  const int lane = threadIdx.x % 32;
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t slot = first + lane;
    const int expert = slot < end ? p.expert(slot) : -1;
    const unsigned same = __match_any_sync(kAllLanes, expert);
    body(slot, expert, __popc(same & ((1u << lane) - 1)), same);
    __syncwarp();
  }
}

__device__ __forceinline__ void count_slots(const SortParams& p, int64_t begin, int64_t end, int32_t* counts) {
  each_slot(p, begin, end, [&](int64_t, int expert, int rank, unsigned same) {
    if (expert >= 0 && rank == 0) counts[expert] += __popc(same);
  });
}

// Write the slots of a range. `next` holds the next row of each expert for this warp.
__device__ __forceinline__ void place_slots(const SortParams& p, int64_t begin, int64_t end, int32_t* next) {
  each_slot(p, begin, end, [&](int64_t slot, int expert, int rank, unsigned same) {
    const int32_t row = expert >= 0 ? next[expert] + rank : 0;
    __syncwarp();
    if (expert < 0) return;
    if (rank == 0) next[expert] += __popc(same);
    p.tokens[row] = static_cast<int32_t>(slot / p.top_k);
    p.rows[slot] = expert < p.experts ? row : -1;
  });
}

// Turn `ranges` rows of counts [experts + 1] into the first row of each expert in each range, and write
// indptr. All threads of a CTA call it; `partial` has 32 entries.
__device__ __forceinline__ void scan_counts(const SortParams& p, int32_t* counts, int64_t ranges, int32_t* partial) {
  const int all = p.experts + 1, threads = blockDim.x, thread = threadIdx.x;
  int32_t before = 0;  // slots of the experts of earlier steps
  for (int first = 0; first < all; first += threads) {
    const int expert = first + thread;
    int32_t total = 0;
    if (expert < all)
      for (int64_t range = 0; range < ranges; ++range) total += counts[range * all + expert];
    int32_t upto = total;
    for (int by = 1; by < 32; by *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, upto, by);
      if (thread % 32 >= by) upto += other;
    }
    __syncthreads();
    if (thread % 32 == 31) partial[thread / 32] = upto;
    __syncthreads();
    int32_t row = before + upto - total, step = 0;
    for (int warp = 0; warp < threads / 32; ++warp) {
      if (warp < thread / 32) row += partial[warp];
      step += partial[warp];
    }
    before += step;
    if (expert < all) {
      p.indptr[expert] = row;
      for (int64_t range = 0; range < ranges; ++range) {
        const int32_t count = counts[range * all + expert];
        counts[range * all + expert] = row;
        row += count;
      }
    }
  }
}

__device__ __forceinline__ void clear_counts(int32_t* counts, int64_t number) {
  for (int64_t i = threadIdx.x; i < number; i += blockDim.x) counts[i] = 0;
}

// Sort few slots by one CTA, whose first `warps` warps take a range each.
inline __global__ void __launch_bounds__(kSortThreads) sort_small_kernel(const SortParams p, int warps) {
  extern __shared__ int32_t counts[];
  __shared__ int32_t partial[kSortWarps];
  const int warp = threadIdx.x / 32, all = p.experts + 1;
  clear_counts(counts, int64_t{warps} * all);
  wait_for_inputs();
  launch_dependents();
  __syncthreads();
  const int64_t each = (p.slots + warps - 1) / warps, begin = warp * each;
  const int64_t end = begin + each < p.slots ? begin + each : p.slots;
  if (warp < warps) count_slots(p, begin, end, counts + warp * all);
  __syncthreads();
  scan_counts(p, counts, warps, partial);
  __syncthreads();
  if (warp < warps) place_slots(p, begin, end, counts + warp * all);
}

inline __global__ void count_slots_kernel(const SortParams p) {
  extern __shared__ int32_t counts[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, all = p.experts + 1;
  clear_counts(counts, int64_t{warps} * all);
  wait_for_inputs();
  launch_dependents();
  __syncthreads();
  const int64_t range = int64_t{blockIdx.x} * warps + warp, begin = range * kSlotsOfWarp;
  const int64_t end = begin + kSlotsOfWarp < p.slots ? begin + kSlotsOfWarp : p.slots;
  count_slots(p, begin, end, counts + warp * all);
  __syncwarp();
  for (int expert = threadIdx.x % 32; begin < p.slots && expert < all; expert += 32)
    p.workspace[range * all + expert] = counts[warp * all + expert];
}

inline __global__ void __launch_bounds__(kSortThreads) scan_slots_kernel(const SortParams p, int64_t ranges) {
  __shared__ int32_t partial[kSortWarps];
  wait_for_inputs();
  launch_dependents();
  scan_counts(p, p.workspace, ranges, partial);
}

inline __global__ void place_slots_kernel(const SortParams p) {
  extern __shared__ int32_t counts[];
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, all = p.experts + 1;
  wait_for_inputs();
  launch_dependents();
  const int64_t range = int64_t{blockIdx.x} * warps + warp, begin = range * kSlotsOfWarp;
  const int64_t end = begin + kSlotsOfWarp < p.slots ? begin + kSlotsOfWarp : p.slots;
  if (begin >= end) return;
  for (int expert = threadIdx.x % 32; expert < all; expert += 32)
    counts[warp * all + expert] = p.workspace[range * all + expert];
  __syncwarp();
  place_slots(p, begin, end, counts + warp * all);
}

inline int64_t sort_ranges(int64_t slots) { return (slots + kSlotsOfWarp - 1) / kSlotsOfWarp; }

inline void sort_slots(const SortParams& p, const Launch& where) {
  const int warps = sort_warps(p.experts);
  const int64_t bytes = int64_t{4} * warps * (p.experts + 1);
  if (p.slots <= kSmallSort) return Kernel<sort_small_kernel>::launch(1, kSortThreads, bytes, where, p, warps);
  const int64_t ranges = sort_ranges(p.slots);
  const auto blocks = static_cast<unsigned>((ranges + warps - 1) / warps);
  Kernel<count_slots_kernel>::launch(blocks, 32 * warps, bytes, where, p);
  launch(scan_slots_kernel, 1, kSortThreads, where, p, ranges);
  Kernel<place_slots_kernel>::launch(blocks, 32 * warps, bytes, where, p);
}

}  // namespace flashinfer::cuda
