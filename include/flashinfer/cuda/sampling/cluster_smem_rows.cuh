// Filters and draws for rows in the smem of a cluster: the counterpart of rows.cuh.
#pragma once

#include <flashinfer/cuda/sampling/cluster_smem_threshold.cuh>
#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

struct Exponential {
  float least, top, scale;

  __device__ __forceinline__ float operator()(float x) const {
    return ptx::ex2_approx(((x < least ? -INFINITY : x) - top) * scale);
  }
};

struct ClusterSmemRow : ClusterSmemSearch {
  // Apply the filters and return the threshold, as apply_filters() in rows.cuh.
  __device__ __forceinline__ float filter(const Filters& f, bool top_k_first, DType dtype, Totals& row_totals) {
    float t = 0;
    if (!row_totals.valid || !f.valid()) {
      row_totals.valid = false;
      return t;
    }
    if (!f.top_k.on && !f.has_top_p && !f.has_min_p) return t;
    float maximum = largest();
    if (f.has_min_p) t = f.min_p >= 1 ? maximum : static_cast<float>(f.min_p) * maximum;
    if (f.top_k.on) t = fmaxf(t, __uint_as_float(top_k_key<Unsigned>(__float_as_uint(maximum), f.top_k.k)));
    if (f.has_top_p) {
      if (f.top_k.on && top_k_first) {
        sum_kept(t);
        const Normalizer by = Normalizer::of(totals(row_totals.fixed).real());
        transform<true>([&](float x) { return x >= t ? rounded(by(x), dtype) : 0.0f; });
        row_totals = totals();
        maximum = largest(), t = 0;
      }
      t = fmaxf(t, top_p(f.top_p, row_totals, maximum));
    }
    sum_kept(t);
    const Totals kept = totals(row_totals.fixed);
    row_totals.total = kept.total, row_totals.valid = kept.valid;
    return t;
  }

  // Find the chunk whose running sum passes the share, and the share left in it. One warp calls this and
  // stores both to Scratch.
  __device__ __forceinline__ void choose_chunk(const SampleParams& p, int64_t output, const Totals& totals) const {
    const float* of_chunks = sums();
    const int per_lane = (cluster_row.chunks + 31) / 32, from = lane_id() * per_lane,
              to = min(from + per_lane, cluster_row.chunks);
    uint64_t own = 0;
    for (int c = from; c < to; ++c) own += totals.fixed(of_chunks[c]);
    const uint64_t end = warp_inclusive_sum(own);
    uint64_t share = share_of(p.random.draw(output, 0), totals.total);
    if (end - own <= share && share < end) {
      int c = from;
      share -= end - own;
      for (uint64_t part; (part = totals.fixed(of_chunks[c])) <= share; ++c) share -= part;
      scratch().found_above = share, scratch().found_position = c;
    }
    __syncwarp();
  }

  // Draw the first element whose running sum passes the share. All threads call this; the warp of the chunk
  // draws.
  __device__ __forceinline__ void draw(const SampleParams& p, int64_t output, const Totals& totals, float t) const {
    if (!totals.valid) {
      if (cluster_row.rank == 0 && threadIdx.x == 0) write_sample(p, output, 0, false);
      return;
    }
    if (cluster_row.warp() == 0) choose_chunk(p, output, totals);
    __syncthreads();
    const int c = scratch().found_position;
    for_chunks([&](const Chunk& x, int warp_chunk) {
      if (chunk(warp_chunk) == c) find_in_chunk(x, c, scratch().found_above, p, output, totals, t);
    });
  }
  // Draw from a row in global memory, whose elements are change(x). One warp draws, and the others need not
  // wait.
  template <typename F>
  __device__ __forceinline__ void draw_from(const Source& source, float padding, const SampleParams& p, int64_t output,
                                            const Totals& totals, float t, const F& change) const {
    if (cluster_row.warp() != 0) return;
    if (!totals.valid) {
      if (lane_id() == 0) write_sample(p, output, 0, false);
      return;
    }
    choose_chunk(p, output, totals);
    const int c = scratch().found_position;
    Chunk x;
    source.load(x, int64_t{c} * kSumChunk, padding);
    x.for_each([&](float& value) { value = change(value); });
    find_in_chunk(x, c, scratch().found_above, p, output, totals, t);
  }

  __device__ __forceinline__ void find_in_chunk(const Chunk& x, int c, uint64_t share, const SampleParams& p,
                                                int64_t output, const Totals& totals, float t) const {
    const int count = min(cluster_row.remaining(c), kSumChunk);
    const auto is_kept = [&](float value, int index) { return value > 0 && value >= t && index < count; };
    int token = -1, last = -1, part = -1;
    uint64_t own[4] = {}, ends[4], start = 0, before = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (is_kept(x.at[j][i], part_start(j) + i)) own[j] += totals.fixed(x.at[j][i]), last = part_start(j) + i;
    }
    warp_inclusive_sum(own, ends);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint64_t end = ends[j] + before;
      if (end - own[j] <= share && share < end) part = j, start = end - own[j];
      before = __shfl_sync(kAllLanes, end, 31);
    }
    if (part >= 0) {
      token = part_start(part);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = part == 0 ? x.at[0][i] : x.at[1][i], high = part == 2 ? x.at[2][i] : x.at[3][i];
        const float value = part < 2 ? low : high;
        if (is_kept(value, part_start(part) + i)) start += totals.fixed(value);
        token += start <= share;
      }
    }
    // Without an element because of rounding, draw the last kept one.
    const int max_token = __reduce_max_sync(kAllLanes, token), kept = __reduce_max_sync(kAllLanes, last);
    if (lane_id() == 0) write_sample(p, output, int64_t{c} * kSumChunk + (max_token >= 0 ? max_token : kept), true);
  }
};

}  // namespace flashinfer::cuda
