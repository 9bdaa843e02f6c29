// Draws with filters that keep few elements, and without filters. The row is read once. That pass collects
// the elements that a filter may keep.
//
// The first chunks give a lower bound of the threshold: for top-k the k-th largest of their lanes' maxima,
// for min-p a share of the largest element. Elements that reach the bound are collected with their positions.
// Sums over kept elements then have the order of common/fixed_sum.h without rereading the row. If too many
// elements reach the bound, the row is reread.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/sampling/stream.cuh>

namespace flashinfer::cuda {

constexpr int64_t kMaxCandidateTopK = 128;  // largest k that the candidate kernels serve

// A streamed row, and those of its elements that a filter may keep.
struct CandidateRow : PipelinedRow {
  // Collect the elements of a pair of chunks that reach `bound`, with their positions in the pair.
  template <typename Key>
  __device__ __forceinline__ void collect(const Chunk& one, const Chunk& other, int pair, float bound) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (one.at[i / 4][i % 4] >= bound) found |= 1u << i;
      if (other.at[i / 4][i % 4] >= bound) found |= 1u << (16 + i);
    }
    const Span span = span_of(found);
    if (lane_id() == 0) begins()[2 * (first_pair + pair)] = span.base, begins()[2 * (first_pair + pair) + 1] = span.all;
    if (span.all == 0 || span.base + span.all > kCollected) return;
    uint32_t at = span.at;
    const auto append = [&](const Chunk& x, int first) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!__any_sync(kAllLanes, found >> (first + 4 * j) & 15)) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(found >> (first + 4 * j + i) & 1)) continue;
          keys()[at] = Key::key(x.at[j][i]);
          positions()[at++] = static_cast<uint16_t>(first * (kSumChunk / 16) + part_start(j) + i);
        }
      }
    };
    append(one, 0), append(other, 16);
  }

  // Read the row and return its largest element, or NaN if the row contains one. Collect the elements that a
  // filter may keep. Sum the chunks of probabilities. Call also(pair) for each pair.
  template <bool kLogits, typename Also>
  __device__ __forceinline__ float stream(const Source& source, const Source& next, const Filters& f,
                                          const Also& also) {
    using Key = std::conditional_t<kLogits, Signed, Unsigned>;
    const float share = static_cast<float>(f.min_p);
    const bool has_share = f.has_min_p && f.min_p < 1, collects = f.top_k.on || f.has_min_p;
    uint32_t* max_key = scratch().counts;  // [0]: largest key; [1]: 1 if the row contains NaN
    if (threadIdx.x == 0) scratch().counter = 0, max_key[0] = 0, max_key[1] = 0;
    __syncthreads();
    // A probability of 0 or a logit of -inf is never drawn.
    float bound = kLogits ? -3.4028234663852886e38f : __uint_as_float(1);
    pass(source, next, 1, kLogits ? -INFINITY : 0.0f, [&](Chunk& one, Chunk& other, int pair) {
      also(pair);
      if constexpr (!kLogits) {
        one.for_each([](float& x) { x = max_nan(x, 0.0f); });
        other.for_each([](float& x) { x = max_nan(x, 0.0f); });
        store_sums(sums(), pair, pair_sum(one, other, [](float x) { return x; }));
        if (!collects) return;
      }
      const float own = larger<true>(lane_max<true>(one), lane_max<true>(other));
      const uint32_t pair_max_key = __reduce_max_sync(kAllLanes, Key::key(own));
      const bool is_nan = __any_sync(kAllLanes, own != own);
      if (lane_id() == 0) {
        atomicMax(max_key, pair_max_key);
        if (is_nan) max_key[1] = 1;
      }
      if (pair == 0) {  // all warps have a first pair
        if (f.top_k.on) {
          const uint32_t reached = lower_bound_of_kth(Key::key(own), static_cast<uint32_t>(f.top_k.k));
          bound = fmaxf(bound, kLogits ? Signed::real(reached) : __uint_as_float(reached));
        }
        __syncthreads();
      }
      if (f.has_min_p) {
        const float known = __uint_as_float(*static_cast<volatile uint32_t*>(max_key));
        bound = fmaxf(bound, has_share ? share * known : known);
      }
      collect<Key>(one, other, pair, bound);
    });
    __syncthreads();
    if (max_key[1] != 0) return NAN;
    return kLogits ? Signed::real(max_key[0]) : __uint_as_float(max_key[0]);
  }

  // Replace collected elements by change(key).
  template <typename F>
  __device__ __forceinline__ void change(const F& f) const {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < scratch().counter; i += blockDim.x) keys()[i] = __float_as_uint(f(keys()[i]));
    __syncthreads();
  }

  // Sum the collected elements >= t.
  __device__ __forceinline__ void sum_collected(float t) {
    cluster_row.sums_buffer ^= 1;
    sum_collected_of(*this, t);
  }
  __device__ __noinline__ static void sum_collected_of(CandidateRow row, float t) { row.store_collected_sums(t); }
  __device__ __forceinline__ void store_collected_sums(float t) const {
    float* x = ready_buffer() + part_start(0);
#pragma unroll 1
    for (int pair = 0; pair < own_pairs; ++pair) {
      const uint32_t begin = begins()[2 * (first_pair + pair)], all = begins()[2 * (first_pair + pair) + 1];
      float sum = 0;
      bool kept = false;
      for (uint32_t i = lane_id(); i < all; i += 32) kept |= __uint_as_float(keys()[begin + i]) >= t;
      if (__any_sync(kAllLanes, kept)) {
        const auto lines = [&](const auto& f) {
#pragma unroll
          for (int j = 0; j < 8; ++j) f(*reinterpret_cast<float4*>(x + 128 * j), j);
        };
        __syncwarp();
        lines([](float4& four, int) { four = make_float4(0, 0, 0, 0); });
        __syncwarp();
        for (uint32_t i = lane_id(); i < all; i += 32) {
          const float value = __uint_as_float(keys()[begin + i]);
          if (value >= t) ready_buffer()[positions()[begin + i]] = value;
        }
        __syncwarp();
        Chunk one, other;
        lines([&](const float4& four, int j) {
          float (&at)[4] = j < 4 ? one.at[j & 3] : other.at[j & 3];
          at[0] = four.x, at[1] = four.y, at[2] = four.z, at[3] = four.w;
        });
        sum = pair_sum(one, other, [](float value) { return value; });
      }
      store_sums(sums(), pair, sum);
    }
    __syncthreads();
  }

  __device__ __forceinline__ double kept_from(uint32_t key, const Totals& row_totals) {
    sum_collected(__uint_as_float(key));
    return totals(row_totals.fixed).real();
  }

  // Return the largest key in [least, most] such that the elements with this key or a larger one hold the
  // share p of the row. The elements from `least` on hold it.
  __device__ __forceinline__ uint32_t top_p_among(uint32_t count, double p, const Totals& row_totals, uint32_t least,
                                                  uint32_t max_key) {
    if (!(p > 0)) return max_key;
    const double target = p * row_totals.real();
    const Weights weights = Weights::of(max_key, cluster_row.n);
    const ThresholdKey edge =
        search<true>(*this, count, least, max_key, static_cast<uint64_t>(ceil(target * weights.factor())), weights);
    const double kept = kept_from(edge.key, row_totals), edges = static_cast<double>(edge.value) / weights.factor();
    if (kept >= target && kept - edges < target) return edge.key;
    // The sums were rounded: bisect with exact sums.
    uint32_t low = least, high = max_key + 1;
    for (;;) {
      int between = 0;
      for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) between |= keys()[i] > low && keys()[i] < high;
      if (!__syncthreads_or(between)) return low;
      const uint32_t middle = low + (high - low) / 2;
      kept_from(middle, row_totals) >= target ? low = middle : high = middle;
    }
  }
};

// Sample a row with too many candidates: reread it.
template <bool kLogits>
__device__ __noinline__ void sample_again(const SampleParams& p, const Source& source, int64_t row) {
  GlobalRow cluster_row = GlobalRow::of(p.vocab_size);
  set_scratch([&](Scratch& s) { s.source = source, s.remap = {}, s.subtracts = false; });
  Totals totals{{1, 1}, 0, false};
  const float t = prepare_row<kLogits>(p, cluster_row, Filters::of(p, row, row), totals);
  draw_run(p, cluster_row, row, row + 1, totals, t);
  __syncthreads();
}

}  // namespace flashinfer::cuda
