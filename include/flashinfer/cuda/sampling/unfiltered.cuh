// Draws without filters. The row is read once for the sums of its chunks, and the drawn chunk again.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

__device__ inline __noinline__ void sum_probs(GlobalRow engine) {
  const Source source = scratch().source;
  engine.begin_pass(engine.chunks);
  engine.each_pair([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, 0.0f); },
                   [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
                     engine.broadcast_pair(engine.sums(), c, has_other,
                                           pair_sum(one, other, [](float x) { return max_nan(x, 0.0f); }));
                   });
  engine.end_pass();
}

__device__ __forceinline__ Totals load_probs_once(GlobalRow& engine) {
  engine.sums_at ^= 1;
  sum_probs(engine);
  ++engine.pass;
  return engine.totals();
}

// Sum exp((l - m) / T) per chunk with its maximum m, and store the maxima.
__device__ inline __noinline__ void sum_exponentials(GlobalRow engine, float scale) {
  const Source source = scratch().source;
  engine.begin_pass(2 * engine.chunks);
  engine.each_pair([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, -INFINITY); },
                   [&](Chunk& one, Chunk& other, int c, bool has_other) {
                     const PairSums result = exponentials_of(one, other, scale);
                     engine.broadcast_pair(engine.maxima(), c, has_other, result.maximum);
                     engine.broadcast_pair(engine.sums(), c, has_other, result.sum);
                   });
  engine.end_pass();
}

__device__ __forceinline__ Totals load_exponentials_once(GlobalRow& engine, double temperature) {
  const float scale = exponent_scale(temperature);
  engine.sums_at ^= 1, engine.maxima_at ^= 1;
  sum_exponentials(engine, scale);
  ++engine.pass;
  float *sums = engine.sums(), *maxima = engine.maxima();
  const float top = largest_of(maxima, engine.chunks);
  set_scratch([&](Scratch& s) {
    s.remap.is_exponential = true, s.remap.least = -INFINITY, s.remap.scale = scale, s.remap.top = top;
  });
  rescale(sums, maxima, engine.chunks, top, scale);
  return engine.totals();
}

__global__ void __launch_bounds__(512, 2) unfiltered_kernel(const __grid_constant__ SampleParams p, int64_t group) {
  sample_groups<false>(p, group, [&](GlobalRow& engine, const Filters& f, Totals& totals) {
    totals = p.is_logits ? load_exponentials_once(engine, f.temperature) : load_probs_once(engine);
    return 0.0f;
  });
}

}  // namespace flashinfer::cuda
