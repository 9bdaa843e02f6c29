// Histograms of keys, and the search for the bin at which their sum, from the top down, reaches a number.
#pragma once

#include <flashinfer/cuda/sampling/cluster_row.cuh>

namespace flashinfer::cuda {

struct FoundBin {
  uint32_t position;  // index from the top
  uint64_t above;     // sum of the bins above
  uint64_t value;     // value of the bin
};

// Return the first position at which the running sum reaches `need`, or `last` if all values are 0. A thread
// has kN positions, from threadIdx.x * kN on.
template <int kN>
__device__ __forceinline__ FoundBin find_bin(const uint64_t (&values)[kN], uint64_t need, uint32_t last) {
  const int lane = lane_id(), warp = threadIdx.x / 32;
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kN; ++i) own += values[i];
  const uint64_t end = warp_inclusive_sum(own);
  if (lane == 31) scratch().warp_totals[warp] = end;
  if (threadIdx.x == 0) scratch().found_above = scratch().found_value = 0, scratch().found_position = last;
  __syncthreads();
  const uint64_t of_warp = lane < blockDim.x / 32 ? scratch().warp_totals[lane] : 0;
  const uint64_t total = lanes_sum<32>(of_warp), before = lanes_sum<32>(lane < warp ? of_warp : 0);
  need = need > total ? total : need;
  need = need < 1 ? 1 : need;
  uint64_t above = before + end - own;
  if (above < need && need <= above + own) {
    for (int i = 0; i < kN; ++i) {
      if (need <= above + values[i]) {
        scratch().found_above = above, scratch().found_value = values[i];
        scratch().found_position = threadIdx.x * kN + i;
        break;
      }
      above += values[i];
    }
  }
  __syncthreads();
  return {scratch().found_position, scratch().found_above, scratch().found_value};
}

// At most kCount bins of equal width for the keys from low to high.
template <int kCount>
struct Bins {
  uint32_t low, high, shift;

  __device__ Bins(uint32_t from, uint32_t to) : low(from), high(to) {
    constexpr int kBits = kCount == 1024 ? 10 : kCount == 512 ? 9 : 8;
    const int width = 32 - __clz(to - from);
    shift = width > kBits ? width - kBits : 0;
  }
  __device__ bool holds(uint32_t key) const { return key >= low && key <= high; }
  __device__ uint32_t bin_of(uint32_t key) const { return (key - low) >> shift; }
  __device__ void narrow(uint32_t bin) {
    const uint32_t last = ((bin + 1) << shift) - 1;
    high = bin + 1 == kCount || last > high - low ? high : low + last;
    low += bin << shift;
  }
};

// Weight of an element: an integer of 2 * bits bits. A bin sums its lower and upper half in two words, so
// neither overflows.
struct Weights {
  float first, second;  // two factors, because their product may not fit into a float
  int bits;

  // Weights for keys up to `high`, which are the bits of numbers >= 0.
  __device__ static Weights of(uint32_t high, int64_t n) {
    const int bits = n <= (int64_t{1} << 20) ? 12 : 8;
    const int exponent = static_cast<int>(high >> 23) - 127, up = 2 * bits - 1 - exponent, half = up / 2;
    return {static_cast<float>(power_of_two(half)), static_cast<float>(power_of_two(up - half)), bits};
  }
  __device__ __forceinline__ double factor() const { return static_cast<double>(first) * second; }
  __device__ __forceinline__ uint32_t operator()(float x) const { return __float2uint_rn(x * first * second); }
  __device__ __forceinline__ void add(uint32_t* pair, float x) const {
    const uint32_t q = (*this)(x);
    atomicAdd(pair, q & ((1u << bits) - 1)), atomicAdd(pair + 1, q >> bits);
  }
  __device__ __forceinline__ uint64_t sum(uint32_t low, uint32_t high) const { return (uint64_t{high} << bits) + low; }
};

// Return the weight of x in a histogram whose weights sum to 2^30: x / total * 2^30, rounded. `to_weight`
// divides by total * 2^-30.
__device__ __forceinline__ uint32_t share_weight(float x, Normalizer to_weight) {
  // The addition rounds, unless the integer takes more than 23 bits.
  const float raised = x * to_weight.up, sum = fmaf(raised, to_weight.inverse, 0x1p23f);
  return sum < 0x1p24f ? __float_as_uint(sum) & 0x7fffffu : __float2uint_rn(raised * to_weight.inverse);
}

// Key of a threshold, and the number or the sum of the elements with that key.
struct ThresholdKey {
  uint32_t key;
  uint64_t value;
};

// Return the largest threshold at which the sum of kept elements reaches `target`. kept(key) returns the
// exact sum of the elements >= key. `guess` comes from rounded sums, so it may be wrong by a few elements.
// `edge_sum` is the sum of the elements with that key. The search starts there with steps that grow
// eightfold, then bisects.
template <typename Kept>
__device__ __forceinline__ float refine_threshold(uint32_t guess, double edge_sum, uint32_t max_key, double target,
                                                  FixedPoint fixed, const Kept& kept) {
  uint32_t from = 0, to = max_key + 1, key = guess;  // kept(from) >= target > kept(to)
  for (uint32_t step = 1; to - from > 1; step = step < 1u << 27 ? step * 8 : step) {
    const double sum = kept(key);
    if (key == guess && is_threshold(sum, edge_sum, __uint_as_float(key), target, fixed)) return __uint_as_float(key);
    const bool enough = sum >= target;
    (enough ? from : to) = key;
    const uint32_t middle = from + (to - from) / 2;
    key = enough ? min(middle, from + step) : max(middle, to - min(step, to));
  }
  return __uint_as_float(from);
}

// Return the exact threshold. A histogram of rounded weights, 2^30 for the row's sum `mass`, has found its
// bin. `above` is the weight of all bins above it, `high` its last key. find_key(need) searches the bin. If
// rounding led to a wrong element, the exact sum above the bin corrects `need`.
template <typename FindKey, typename Kept>
__device__ __forceinline__ float exact_threshold(Weights weights, uint64_t needed_weight, uint64_t above, double mass,
                                                 uint32_t high, uint32_t max_key, double target, FixedPoint fixed,
                                                 const FindKey& find_key, const Kept& kept) {
  double missing = static_cast<double>(needed_weight > above ? needed_weight - above : 1) * (mass * 0x1p-30);
  for (bool is_guess = true;; is_guess = false) {
    const ThresholdKey edge = find_key(missing > 0 ? static_cast<uint64_t>(ceil(missing * weights.factor())) : 1);
    const double edge_sum = static_cast<double>(edge.value) / weights.factor(), sum = kept(edge.key);
    if (!is_guess || (sum >= target && sum - edge_sum < target))
      return refine_threshold(edge.key, edge_sum, max_key, target, fixed, kept);
    missing = target - kept(high + 1);
  }
}

}  // namespace flashinfer::cuda
