// Draws without filters. The row is read once for the sums of its chunks, and the drawn chunk again.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

__device__ inline __noinline__ void sum_probs(StreamedRow e) {
  const Source source = scratch().source;
  e.begin_pass(e.chunks);
  e.each_pair([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, 0.0f); },
              [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
                e.broadcast_pair(e.sums(), c, has_other,
                                 pair_sum(one, other, [](float x) { return max_nan(x, 0.0f); }));
              });
  e.end_pass();
}

__device__ __forceinline__ Totals load_probs_once(StreamedRow& e) {
  e.sums_at ^= 1;
  sum_probs(e);
  ++e.pass;
  return e.totals();
}

// Sum exp((l - m) / T) per chunk with its maximum m, and store the maxima.
__device__ inline __noinline__ void sum_exponentials(StreamedRow e, float scale) {
  const Source source = scratch().source;
  e.begin_pass(2 * e.chunks);
  e.each_pair([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, -INFINITY); },
              [&](Chunk& one, Chunk& other, int c, bool has_other) {
                const PairSums result = exponentials_of(one, other, scale);
                e.broadcast_pair(e.maxima(), c, has_other, result.maximum);
                e.broadcast_pair(e.sums(), c, has_other, result.sum);
              });
  e.end_pass();
}

__device__ __forceinline__ Totals load_exponentials_once(StreamedRow& e, double temperature) {
  const float scale = exponent_scale(temperature);
  e.sums_at ^= 1, e.maxima_at ^= 1;
  sum_exponentials(e, scale);
  ++e.pass;
  float *sums = e.sums(), *maxima = e.maxima();
  const float top = largest_of(maxima, e.chunks);
  set_scratch([&](Scratch& s) {
    s.remap.is_exponential = true, s.remap.least = -INFINITY, s.remap.scale = scale, s.remap.top = top;
  });
  rescale(sums, maxima, e.chunks, top, scale);
  return e.totals();
}

__global__ void __launch_bounds__(512, 2) unfiltered_kernel(const __grid_constant__ SampleParams p, int64_t group) {
  sample_groups<false>(p, group, [&](StreamedRow& e, const Filters& f, Totals& totals) {
    totals = p.is_logits ? load_exponentials_once(e, f.temperature) : load_probs_once(e);
    return 0.0f;
  });
}

}  // namespace flashinfer::cuda
