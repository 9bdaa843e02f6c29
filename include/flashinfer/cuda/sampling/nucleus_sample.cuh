// An interval for the threshold of a row, from a sample of its elements.
#pragma once

#include <flashinfer/cuda/sampling/nucleus_read.cuh>

namespace flashinfer::cuda {

constexpr int kTargetElements = kCollectedGroups * 7 / 10;      // elements that an interval should contain
constexpr int kSampleElements = kNucleusWarps * 2 * kSumChunk;  // elements: the first pair of chunks of each warp

// Result of a read of the row.
enum class Outcome { kFound, kAbove, kBelow, kTooMany };
struct Resolved {
  Outcome outcome;
  float t;
  uint64_t kept;  // sum of the elements >= the threshold, if found
  // Sum of the elements >= the interval's high (kAbove, kTooMany) or low (kBelow). For an interval with low =
  // INFINITY: of the elements >= high.
  double sum;
};

// Keys that bound the threshold, and the sum of the elements >= `high`. The threshold is at least
// `sufficient`: the elements >= `sufficient` reach the target.
struct Bounds {
  uint32_t low, high, sufficient;
  int misses;  // number of intervals since the last one with too many elements
  double sum;

  // Bounds before the first interval. `high` bounds every chunk's sum, and so every element.
  __device__ static Bounds all(FixedPoint fixed) {
    return {1, __float_as_uint(static_cast<float>(fmin(fixed.down * 0x1p48, 0x1p128))), 1, 0, 0};
  }
  __device__ void update(const Interval& interval, const Resolved& result) {
    const uint32_t from = __float_as_uint(interval.low), to = __float_as_uint(interval.high);
    if (result.outcome == Outcome::kAbove) {
      low = sufficient = to;
    } else {
      high = min(high, result.outcome == Outcome::kBelow ? min(from, to) : to), sum = result.sum;
      if (result.outcome == Outcome::kTooMany) low = from;
    }
    if (low >= high) low = sufficient;
    misses = result.outcome == Outcome::kTooMany ? 0 : misses + 1;
  }
  __device__ bool has_one_key() const { return high - low == 1; }
};

// Results of a read that later reads of the row use, in smem.
struct NucleusState {
  double sample;                 // sum of the sample; 0: the sample gives no interval
  Normalizer to_weight;          // maps an element of the sample to its weight
  int base;                      // key of the first bin
  uint32_t from_high, from_low;  // sample weight of the elements >= the interval's ends
  double p, target;
  Totals row_totals;
  Bounds bounds;
};
__device__ __forceinline__ NucleusState& nucleus_state() {
  __shared__ NucleusState shared;
  return shared;
}

struct NucleusSample : NucleusRead {
  using NucleusRead::NucleusRead;

  // Return the smallest key of a bin; bins have six bits of the mantissa.
  __device__ __forceinline__ static float edge(int base, int bin) {
    const int bin_key = base + bin;
    return __uint_as_float(bin_key < 0 ? 0u : min(static_cast<uint32_t>(bin_key) << 17, 0x7f800000u));
  }

  // Add the weights of the sample's elements to bins, 2^30 in total.
  __device__ __forceinline__ void weigh_sample(const Chunk (&pair)[2]) {
    float own = 0, maximum = 0;
    const auto scan = [&](const Chunk& x) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        own += max_nan(x.at[i / 4][i % 4], 0.0f), maximum = fmaxf(maximum, x.at[i / 4][i % 4]);
    };
    scan(pair[0]), scan(pair[1]);
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) own += __shfl_xor_sync(kAllLanes, own, apart);
    const uint32_t key = __reduce_max_sync(kAllLanes, __float_as_uint(maximum));
    float* parts = maxima();
    if (lane_id() == 0)
      parts[cluster_row.warp()] = own, parts[kNucleusWarps + cluster_row.warp()] = __uint_as_float(key);
    for (int i = threadIdx.x; i < kSampleBins; i += blockDim.x) sample()[i] = 0;
    __syncthreads();
    own = parts[lane_id() & (kNucleusWarps - 1)];
#pragma unroll
    for (int apart = kNucleusWarps / 2; apart > 0; apart /= 2) own += __shfl_xor_sync(kAllLanes, own, apart);
    const int base =
        static_cast<int>(cluster_row.largest_bits(parts + kNucleusWarps, kNucleusWarps) >> 17) - (kSampleBins - 1);
    const double mass = own > 0 && own < INFINITY ? own : 0;
    const Normalizer to_weight = Normalizer::of(mass * 0x1p-30);
    if (threadIdx.x == 0)
      nucleus_state().sample = mass, nucleus_state().to_weight = to_weight, nucleus_state().base = base;
    const auto add = [&](const Chunk& x) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float value = fmaxf(x.at[i / 4][i % 4], 0.0f);
        const uint32_t weight = share_weight(value, to_weight);
        if (weight != 0) atomicAdd(sample() + max(static_cast<int>(__float_as_uint(value) >> 17) - base, 0), weight);
      }
    };
    if (mass != 0) add(pair[0]), add(pair[1]);
    __syncthreads();
  }

  // Return an interval around the element at which the sample's weights, summed from the top, reach `need`.
  // It spans about `count` elements of the row, half of them on each side, or starts at the top. `least` is a
  // lower bound of the threshold.
  __device__ __forceinline__ Interval around(uint32_t need, int count, float least) const {
    const Normalizer to_weight = nucleus_state().to_weight;
    const int base = nucleus_state().base;
    const auto bin_of = [](int i) { return kSampleBins - 1 - 4 * static_cast<int>(threadIdx.x) - i; };
    // One word holds a bin's weight and 16 times its number of elements.
    uint64_t words[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bin = bin_of(i);
      const uint32_t weight = sample()[bin];
      const float each = 0.5f * (edge(base, bin) + edge(base, bin + 1)) * to_weight.up * to_weight.inverse;
      const float elements = bin == 0 ? 0.0f : fminf(static_cast<float>(weight) / fmaxf(each, 0.5f), kSampleElements);
      words[i] = static_cast<uint64_t>(weight) << 32 | __float2uint_rn(16 * elements);
      own += words[i];
    }
    const uint64_t end = warp_inclusive_sum(own);
    Scratch& s = scratch();
    __syncthreads();
    if (lane_id() == 31) s.warp_totals[cluster_row.warp()] = end;
    if (threadIdx.x == 0) {
      s.counts[0] = 0, s.counts[1] = __float_as_uint(least), s.counts[2] = __float_as_uint(INFINITY);
      nucleus_state().from_high = 0, nucleus_state().from_low = 1u << 30;
    }
    __syncthreads();
    const uint64_t of_warp = lane_id() < kNucleusWarps ? s.warp_totals[lane_id()] : 0;
    const uint64_t total = lanes_sum<32>(of_warp),
                   start = lanes_sum<32>(lane_id() < cluster_row.warp() ? of_warp : 0) + end - own;
    need = max(min(need, static_cast<uint32_t>(total >> 32)), 1u);
    uint64_t at = start;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint64_t next = at + words[i];
      if (at >> 32 < need && need <= next >> 32)
        s.counts[0] = static_cast<uint32_t>(at + static_cast<uint32_t>(words[i]) / 2);
      at = next;
    }
    __syncthreads();
    const uint32_t middle = s.counts[0],
                   half = static_cast<uint32_t>(16 * int64_t{count} * kSampleElements / cluster_row.n) / 2;
    const bool from_top = middle <= half + half / 2;
    const uint32_t from = from_top ? 0 : middle - half, to = from_top ? 2 * half : middle + half;
    at = start;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bin = bin_of(i);
      const uint64_t next = at + words[i];
      const uint32_t bin_begin = static_cast<uint32_t>(at), bin_end = static_cast<uint32_t>(next);
      if (!from_top && bin_begin <= from && from < bin_end)
        s.counts[2] = __float_as_uint(edge(base, bin + 1)), nucleus_state().from_high = at >> 32;
      if (bin_begin < to && to <= bin_end && edge(base, bin) > least)
        s.counts[1] = __float_as_uint(edge(base, bin)), nucleus_state().from_low = next >> 32;
      at = next;
    }
    __syncthreads();
    return {__uint_as_float(s.counts[1]), __uint_as_float(s.counts[2])};
  }

  // Return a lower bound of the threshold: if the row's sum is at least `mass`, all smaller elements add up
  // to less than 1 - p of it.
  __device__ __forceinline__ float least(double p, double mass) const {
    return fmaxf(static_cast<float>((1 - fmax(p, 0.0)) * mass / cluster_row.n * 0.999), __uint_as_float(1));
  }
};

}  // namespace flashinfer::cuda
