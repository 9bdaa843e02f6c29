// Where a sum over bins, from the top down, reaches a number.
#pragma once

#include <flashinfer/cuda/sampling/engine.cuh>

namespace flashinfer::cuda {

struct Found {
  uint32_t position;  // from the top
  uint64_t above;     // the sum over what lies above it
  uint64_t value;     // its own
};

// The thread's positions are threadIdx.x * kN and on, for all threads of the block. `last` is the answer where all is
// 0.
template <int kN>
__device__ __forceinline__ Found find(const uint64_t (&values)[kN], uint64_t need, uint32_t last) {
  const int lane = lane_id(), warp = threadIdx.x / 32;
  uint64_t own = 0;
#pragma unroll
  for (int i = 0; i < kN; ++i) own += values[i];
  uint64_t end = own;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const uint64_t other = __shfl_up_sync(kWarp, end, apart);
    if (lane >= apart) end += other;
  }
  if (lane == 31) scratch().warp_totals[warp] = end;
  if (threadIdx.x == 0) scratch().found_above = scratch().found_value = 0, scratch().found_position = last;
  __syncthreads();
  const uint64_t one = lane < blockDim.x / 32 ? scratch().warp_totals[lane] : 0;
  const uint64_t total = warp_sum(one), before = warp_sum(lane < warp ? one : 0);
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

// Keys from low to high in at most kCount bins of equal width.
template <int kCount>
struct Bins {
  uint32_t low, high, shift;

  __device__ Bins(uint32_t from, uint32_t to) : low(from), high(to) {
    constexpr int kBits = kCount == 1024 ? 10 : kCount == 512 ? 9 : 8;
    const int width = 32 - __clz(to - from);
    shift = width > kBits ? width - kBits : 0;
  }
  __device__ bool holds(uint32_t key) const { return key >= low && key <= high; }
  __device__ uint32_t of(uint32_t key) const { return (key - low) >> shift; }
  __device__ void narrow(uint32_t bin) {
    const uint32_t last = ((bin + 1) << shift) - 1;
    high = bin + 1 == kCount || last > high - low ? high : low + last;
    low += bin << shift;
  }
};

// An element's share in the sums of a bin: an integer of 2 * bits bits, in two words that do not overflow.
struct Weights {
  float up, more;  // their product may be more than a float can hold
  int bits;

  // Of keys up to `high`, which are the bits of numbers >= 0.
  __device__ static Weights of(uint32_t high, int64_t n) {
    const int bits = n <= (int64_t{1} << 20) ? 12 : 8;
    const int exponent = static_cast<int>(high >> 23) - 127, up = 2 * bits - 1 - exponent, half = up / 2;
    return {static_cast<float>(power_of_two(half)), static_cast<float>(power_of_two(up - half)), bits};
  }
  __device__ __forceinline__ double real() const { return static_cast<double>(up) * more; }
  __device__ __forceinline__ uint32_t operator()(float x) const { return __float2uint_rn(x * up * more); }
  __device__ __forceinline__ void add(uint32_t* pair, float x) const {
    const uint32_t q = (*this)(x);
    atomicAdd(pair, q & ((1u << bits) - 1)), atomicAdd(pair + 1, q >> bits);
  }
  __device__ __forceinline__ uint64_t sum(uint32_t low, uint32_t high) const { return (uint64_t{high} << bits) + low; }
};

}  // namespace flashinfer::cuda
