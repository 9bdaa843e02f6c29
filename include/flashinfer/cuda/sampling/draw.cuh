// Draws from a row with chunk sums: a warp finds the chunk by its sum, then the element in it.
#pragma once

#include <flashinfer/cuda/sampling/cluster_row.cuh>

namespace flashinfer::cuda {

// Draws from a chunk of a row.
template <bool kResident>
struct ChunkDraw {
  ClusterRow<kResident> cluster_row;
  Totals totals;
  float threshold;

  static constexpr int kElementsPerLane = kSumChunk / 32;

  // Read a lane's kEach elements of chunk c.
  __device__ __forceinline__ void read(int c, float (&x)[kElementsPerLane]) const {
    const int from = lane_id() * kElementsPerLane;
    const int chunks_per_cta = ClusterRow<kResident>::own_chunks(cluster_row.chunks, cluster_row.size),
              owner = c / chunks_per_cta;
    const int resident_index = c - owner * chunks_per_cta - cluster_row.streamed_of(cluster_row.chunks_of_rank(owner));
    if (kResident && resident_index >= 0) {
      const uint32_t at = ptx::of_rank(cluster_row.x() + resident_index * kSumChunk + from, owner);
#pragma unroll
      for (int i = 0; i < kElementsPerLane; i += 4) {
        const uint4 four = ptx::load4_of_rank(at + 4 * i);
        x[i] = __uint_as_float(four.x), x[i + 1] = __uint_as_float(four.y);
        x[i + 2] = __uint_as_float(four.z), x[i + 3] = __uint_as_float(four.w);
      }
    } else {
      const Scratch& s = scratch();
      const int64_t start_at = int64_t{c} * kSumChunk + from;
      float subtrahend[kElementsPerLane] = {};
      s.source.load_some(x, start_at);
      if (s.subtracts) s.subtracted.load_some(subtrahend, start_at);
#pragma unroll
      for (int i = 0; i < kElementsPerLane; ++i) {
        x[i] = s.remap(x[i]);
        if (s.subtracts) x[i] = max_nan(x[i] - max_nan(subtrahend[i], 0.0f), 0.0f);
      }
    }
  }

  // Return the first element of chunk c whose running sum passes `share`. If there is none because of
  // rounding, return the last kept element.
  __device__ int64_t find_in_chunk(int c, uint64_t share) const {
    const int from = lane_id() * kElementsPerLane, count = min(cluster_row.remaining(c), kSumChunk);
    float x[kElementsPerLane];
    read(c, x);
    uint64_t sums[kElementsPerLane], own = 0;
    int last = -1;
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      if (x[i] > 0 && x[i] >= threshold && from + i < count) own += totals.fixed(x[i]), last = from + i;
      sums[i] = own;
    }
    const uint64_t end_at = warp_inclusive_sum(own), before = end_at - own;
    const unsigned passed = __ballot_sync(kAllLanes, end_at > share);
    const int64_t base = int64_t{c} * kSumChunk;
    if (passed == 0) return base + __reduce_max_sync(kAllLanes, last);
    int result = 0;
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) result += before + sums[i] <= share;
    return base + __shfl_sync(kAllLanes, from + result, __ffs(passed) - 1);
  }
};

// Draws by a running sum over chunks. Lane l holds the sum of `per_lane` chunks from l * per_lane on.
template <bool kResident>
struct Draw : ChunkDraw<kResident> {
  using ChunkDraw<kResident>::cluster_row, ChunkDraw<kResident>::totals;
  int per_lane;
  uint64_t start, end;

  __device__ Draw(const ClusterRow<kResident>& cluster_row, const Totals& of_kept, float t)
      : ChunkDraw<kResident>{cluster_row, of_kept, t}, per_lane((cluster_row.chunks + 31) / 32) {
    const float* sums = cluster_row.sums();
    const int from = lane_id() * per_lane, to = min(from + per_lane, cluster_row.chunks);
    uint64_t own = 0;
    for (int c = from; c < to; ++c) own += totals.fixed(sums[c]);
    end = warp_inclusive_sum(own);
    start = end - own;
  }

  // Draw one element by one uniform number. All lanes of a warp call this.
  __device__ int64_t operator()(uint64_t uniform) const {
    if (!totals.valid) return 0;
    const float* sums = cluster_row.sums();
    uint64_t share = share_of(uniform, totals.total);
    int c = 0;
    const bool holds = start <= share && share < end;
    if (holds) {
      share -= start, c = lane_id() * per_lane;
      for (uint64_t one; (one = totals.fixed(sums[c])) <= share; ++c) share -= one;
    }
    const int owner = __ffs(__ballot_sync(kAllLanes, holds)) - 1;
    return this->find_in_chunk(__shfl_sync(kAllLanes, c, owner), __shfl_sync(kAllLanes, share, owner));
  }
};

}  // namespace flashinfer::cuda
