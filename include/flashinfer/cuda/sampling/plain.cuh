// Draws without filters: a row is read once for the sums of its chunks, and one chunk again.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

__device__ inline __noinline__ void sum_probs(Engine<false> e) {
  const Source source = scratch().source;
  e.begin(e.chunks);
  e.each_pair([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, 0.0f); },
              [&](const Chunk& one, const Chunk& other, int c, bool two) {
                e.tell_pair(e.sums(), c, two, pair_sum(one, other, [](float x) { return max_nan(x, 0.0f); }));
              });
  e.meet();
}

__device__ __forceinline__ Totals load_probs_once(Engine<false>& e) {
  e.sums_at ^= 1;
  sum_probs(e);
  ++e.pass;
  return e.totals();
}

// Sums of exp((l - max of the chunk) / T), and those maxima.
__device__ inline __noinline__ void sum_exponentials(Engine<false> e, float scale) {
  const Source source = scratch().source;
  e.begin(2 * e.chunks);
  e.each_pair([&](Chunk& chunk, int c) { source.load(chunk, int64_t{c} * kSumChunk, -INFINITY); },
              [&](Chunk& one, Chunk& other, int c, bool two) {
                const float mine = pair_max<true>(one, other);
                const float first = __shfl_sync(kWarp, mine, 0), second = __shfl_sync(kWarp, mine, 16);
                one.each([&](float& l) { l = ptx::ex2_approx((l - first) * scale); });
                other.each([&](float& l) { l = ptx::ex2_approx((l - second) * scale); });
                const float sum = pair_sum(one, other, [](float x) { return x; });
                e.tell_pair(e.maxima(), c, two, mine);
                e.tell_pair(e.sums(), c, two, mine == -INFINITY ? 0.0f : sum);
              });
  e.meet();
}

// Then all relative to the row's.
__device__ __forceinline__ Totals load_exponentials_once(Engine<false>& e, double temperature) {
  const float scale = exponent_scale(temperature);
  e.sums_at ^= 1, e.maxima_at ^= 1;
  sum_exponentials(e, scale);
  ++e.pass;
  float *sums = e.sums(), *maxima = e.maxima();
  const float top = largest_of(maxima, e.chunks);
  set_scratch([&](Scratch& s) {
    s.stage.is_exponential = true, s.stage.least = -INFINITY, s.stage.scale = scale, s.stage.top = top;
  });
  for (int c = threadIdx.x; c < e.chunks; c += blockDim.x)
    if (sums[c] != 0) sums[c] *= ptx::ex2_approx((maxima[c] - top) * scale);
  __syncthreads();
  return e.totals();
}

__global__ void __launch_bounds__(512, 2) plain_kernel(const __grid_constant__ SampleParams p, int64_t group) {
  sample_groups<false>(p, group, [&](Engine<false>& e, const Filters& f, Totals& totals) {
    totals = p.is_logits ? load_exponentials_once(e, f.temperature) : load_probs_once(e);
    return 0.0f;
  });
}

}  // namespace flashinfer::cuda
