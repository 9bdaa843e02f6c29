// Draws without filters. The row is read once for the sums of its chunks, and the drawn chunk again.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

__device__ inline __noinline__ void sum_probs(GlobalRow cluster) {
  const Source source = scratch().source;
  cluster.begin_pass(cluster.chunks);
  cluster.for_chunk_pairs([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, 0.0f); },
                          [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
                            cluster.broadcast_pair(cluster.sums(), c, has_other,
                                                   pair_sum(one, other, [](float x) { return max_nan(x, 0.0f); }));
                          });
  cluster.end_pass();
}

__device__ __forceinline__ Totals load_probs_once(GlobalRow& cluster) {
  cluster.sums_buffer ^= 1;
  sum_probs(cluster);
  ++cluster.pass;
  return cluster.totals();
}

// Sum exp((l - m) / T) per chunk with its maximum m, and store the maxima.
__device__ inline __noinline__ void sum_exponentials(GlobalRow cluster, float scale) {
  const Source source = scratch().source;
  cluster.begin_pass(2 * cluster.chunks);
  cluster.for_chunk_pairs([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, -INFINITY); },
                          [&](Chunk& one, Chunk& other, int c, bool has_other) {
                            const PairSums result = exponentials_of(one, other, scale);
                            cluster.broadcast_pair(cluster.maxima(), c, has_other, result.maximum);
                            cluster.broadcast_pair(cluster.sums(), c, has_other, result.sum);
                          });
  cluster.end_pass();
}

__device__ __forceinline__ Totals load_exponentials_once(GlobalRow& cluster, double temperature) {
  const float scale = exponent_scale(temperature);
  cluster.sums_buffer ^= 1, cluster.maxima_buffer ^= 1;
  sum_exponentials(cluster, scale);
  ++cluster.pass;
  float *sums = cluster.sums(), *maxima = cluster.maxima();
  const float top = largest_of(maxima, cluster.chunks);
  set_scratch([&](Scratch& s) {
    s.remap.is_exponential = true, s.remap.least = -INFINITY, s.remap.scale = scale, s.remap.top = top;
  });
  rescale(sums, maxima, cluster.chunks, top, scale);
  return cluster.totals();
}

__global__ void __launch_bounds__(512, 2)
    unfiltered_kernel(const __grid_constant__ SampleParams p, int64_t outputs_per_cluster) {
  sample_groups<false>(p, outputs_per_cluster, [&](GlobalRow& cluster, const Filters& f, Totals& totals) {
    totals = p.is_logits ? load_exponentials_once(cluster, f.temperature) : load_probs_once(cluster);
    return 0.0f;
  });
}

}  // namespace flashinfer::cuda
