// Remap of a row's elements to x >= 0, for chunks that are not in shared memory.
#pragma once

#include <flashinfer/cuda/ptx/approx.cuh>
#include <flashinfer/cuda/sampling/chunk.cuh>

namespace flashinfer::cuda {

// Transformations of all earlier passes. A pass that rereads a chunk applies them again.
struct Remap {
  bool is_raw, is_exponential, is_normalized, is_filtered;
  float least;                          // smaller logits count as -inf
  float top, scale;                     // of exp((l - top) * scale)
  Normalizer normalizer, renormalizer;  // of the softmax, and after the first filter
  float threshold;                      // threshold of the first filter
  DType dtype;                          // type that its result is rounded to

  __device__ __forceinline__ float exponential(float x) const {
    return ptx::ex2_approx(((x < least ? -INFINITY : x) - top) * scale);
  }
  __device__ __forceinline__ float filtered(float x) const {
    return x >= threshold ? rounded(renormalizer(x), dtype) : 0.0f;
  }

  __device__ __forceinline__ float operator()(float x) const {
    if (is_raw) return x;
    x = is_exponential ? exponential(x) : max_nan(x, 0.0f);
    if (is_normalized) x = normalizer(x);
    if (is_filtered) x = filtered(x);
    return x;
  }
  __device__ __forceinline__ void apply(Chunk& chunk) const {
    if (is_raw) return;
    if (is_exponential) {
      const Remap own = *this;
      chunk.for_each([&](float& x) { x = own.exponential(x); });
    } else {
      chunk.for_each([](float& x) { x = max_nan(x, 0.0f); });
    }
    if (is_normalized) {
      const Normalizer by = normalizer;
      chunk.for_each([&](float& x) { x = by(x); });
    }
    if (is_filtered) {
      Chunk copy = chunk;
      filter(copy, *this);
      chunk = copy;
    }
  }
  __device__ __noinline__ static void filter(Chunk& chunk, const Remap& remap) {
    chunk.for_each([&](float& x) { x = remap.filtered(x); });
  }
};

// Largest element m of each chunk of a pair, and sum of exp((l - m) / T). Lanes below 16 hold the first
// chunk.
struct PairSums {
  float maximum, sum;
};
__device__ __forceinline__ PairSums exponentials_of(Chunk& one, Chunk& other, float scale) {
  const float maximum = pair_max<true>(one, other);
  const float first = __shfl_sync(kAllLanes, maximum, 0), second = __shfl_sync(kAllLanes, maximum, 16);
  one.for_each([&](float& l) { l = ptx::ex2_approx((l - first) * scale); });
  other.for_each([&](float& l) { l = ptx::ex2_approx((l - second) * scale); });
  const float sum = pair_sum(one, other, [](float x) { return x; });
  return {maximum, maximum == -INFINITY ? 0.0f : sum};
}
// Make the sums relative to the largest element of the row.
__device__ __forceinline__ void rescale(float* sums, const float* maxima, int chunks, float top, float scale) {
  for (int c = threadIdx.x; c < chunks; c += blockDim.x)
    if (sums[c] != 0) sums[c] *= ptx::ex2_approx((maxima[c] - top) * scale);
  __syncthreads();
}

}  // namespace flashinfer::cuda
