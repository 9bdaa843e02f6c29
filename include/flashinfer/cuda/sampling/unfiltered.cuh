// Draws without filters. The row is read once for the sums of its chunks, and the drawn chunk again.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

__device__ inline __noinline__ void sum_probs(GlobalRow cluster_row) {
  const Source source = scratch().source;
  cluster_row.begin_pass(cluster_row.chunks);
  cluster_row.for_chunk_pairs([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, 0.0f); },
                              [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
                                cluster_row.broadcast_pair(
                                    cluster_row.sums(), c, has_other,
                                    pair_sum(one, other, [](float x) { return max_nan(x, 0.0f); }));
                              });
  cluster_row.end_pass();
}

__device__ __forceinline__ Totals load_probs_once(GlobalRow& cluster_row) {
  cluster_row.sums_buffer ^= 1;
  sum_probs(cluster_row);
  ++cluster_row.pass;
  return cluster_row.totals();
}

// Sum exp((l - m) / T) per chunk with its maximum m, and store the maxima.
__device__ inline __noinline__ void sum_exponentials(GlobalRow cluster_row, float scale) {
  const Source source = scratch().source;
  cluster_row.begin_pass(2 * cluster_row.chunks);
  cluster_row.for_chunk_pairs([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, -INFINITY); },
                              [&](Chunk& one, Chunk& other, int c, bool has_other) {
                                const PairSums result = exponentials_of(one, other, scale);
                                cluster_row.broadcast_pair(cluster_row.maxima(), c, has_other, result.maximum);
                                cluster_row.broadcast_pair(cluster_row.sums(), c, has_other, result.sum);
                              });
  cluster_row.end_pass();
}

__device__ __forceinline__ Totals load_exponentials_once(GlobalRow& cluster_row, double temperature) {
  const float scale = exponent_scale(temperature);
  cluster_row.sums_buffer ^= 1, cluster_row.maxima_buffer ^= 1;
  sum_exponentials(cluster_row, scale);
  ++cluster_row.pass;
  float *sums = cluster_row.sums(), *maxima = cluster_row.maxima();
  const float top = largest_of(maxima, cluster_row.chunks);
  set_scratch([&](Scratch& s) {
    s.remap.is_exponential = true, s.remap.least = -INFINITY, s.remap.scale = scale, s.remap.top = top;
  });
  rescale(sums, maxima, cluster_row.chunks, top, scale);
  return cluster_row.totals();
}

__global__ void __launch_bounds__(512, 2)
    unfiltered_kernel(const __grid_constant__ SampleParams p, int64_t outputs_per_cluster) {
  sample_outputs<false>(p, outputs_per_cluster, [&](GlobalRow& cluster_row, const Filters& f, Totals& totals) {
    totals = p.is_logits ? load_exponentials_once(cluster_row, f.temperature) : load_probs_once(cluster_row);
    return 0.0f;
  });
}

}  // namespace flashinfer::cuda
