// Draws by filters that keep few elements, a block to a row: the row is read once, and what may be kept is collected on
// the way.
//
// The first chunks give a number below the threshold: for top-k the k-th largest of their lanes' maxima, for min-p a
// share of the largest. Elements that reach it are collected with their places, so that sums over what is kept have the
// order of common/fixed_sum.h without another look at the row. Where there are too many, the row is read again.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/sampling/held_rows.cuh>

namespace flashinfer::cuda {

constexpr int kCollected = 5120, kPairs = kHeldChunks / 2, kFewBlocks = 4;
constexpr int64_t kMostFew = 128;  // of top-k

struct FewRow : HeldRow {
  // Bins and keys as those of rows that are held; then places, the chunk that a warp fills, and where pairs begin.
  static int64_t bytes() {
    return (3 * kHeldChunks + kBins + kCollected + kCollected / 2 + kHeldWarps * kSumChunk + 2 * kPairs) * int64_t{4};
  }
  __device__ __forceinline__ uint16_t* places() const { return reinterpret_cast<uint16_t*>(keys() + kCollected); }
  __device__ __forceinline__ float* filled() const {
    return reinterpret_cast<float*>(keys() + kCollected + kCollected / 2) + e.warp() * kSumChunk;
  }
  __device__ __forceinline__ uint32_t* begins() const {
    return keys() + kCollected + kCollected / 2 + kHeldWarps * kSumChunk;
  }
  __device__ __forceinline__ int pair_of(int which) const { return which / 2 * kHeldWarps + e.warp(); }

  template <bool kLogits>
  __device__ __forceinline__ void load(Chunk& one, Chunk& other, const Source& source, int which) const {
    const float padding = kLogits ? -INFINITY : 0.0f;
    source.load(one, int64_t{chunk(which)} * kSumChunk, padding);
    if (has(which + 1)) {
      source.load(other, int64_t{chunk(which + 1)} * kSumChunk, padding);
    } else {
      other.each([&](float& x) { x = padding; });
    }
    if constexpr (kLogits) return;
    one.each([](float& x) { x = max_nan(x, 0.0f); });
    other.each([](float& x) { x = max_nan(x, 0.0f); });
  }

  // Those elements that reach `bound`, and their places in the pair of chunks.
  template <typename Key>
  __device__ __forceinline__ void collect(const Chunk& one, const Chunk& other, int which, float bound) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (one.at[i / 4][i % 4] >= bound) found |= 1u << i;
      if (other.at[i / 4][i % 4] >= bound) found |= 1u << (16 + i);
    }
    uint32_t end = __popc(found);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const uint32_t before = __shfl_up_sync(kWarp, end, apart);
      if (lane_id() >= apart) end += before;
    }
    const uint32_t all = __shfl_sync(kWarp, end, 31);
    uint32_t base = 0;
    if (lane_id() == 0) {
      if (all != 0) base = atomicAdd(&scratch().counter, all);
      begins()[2 * pair_of(which)] = base, begins()[2 * pair_of(which) + 1] = all;
    }
    base = __shfl_sync(kWarp, base, 0);
    if (all == 0 || base + all > kCollected) return;
    uint32_t at = base + end - __popc(found);
    const auto put = [&](const Chunk& x, int first) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!__any_sync(kWarp, found >> (first + 4 * j) & 15)) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (!(found >> (first + 4 * j + i) & 1)) continue;
          keys()[at] = Key::key(x.at[j][i]);
          places()[at++] = static_cast<uint16_t>(first * (kSumChunk / 16) + part_start(j) + i);
        }
      }
    };
    put(one, 0), put(other, 16);
  }

  // The largest element, or NaN where there is one. What may be kept is collected; of probabilities chunks are summed.
  template <bool kLogits>
  __device__ __forceinline__ float stream(const Source& source, const Filters& f) {
    using Key = std::conditional_t<kLogits, Signed, Unsigned>;
    const float share = static_cast<float>(f.min_p);
    const bool shares = f.has_min_p && f.min_p < 1;
    uint32_t* most = scratch().counts;  // the largest key; whether there is a NaN
    if (threadIdx.x == 0) scratch().counter = 0, most[0] = 0, most[1] = 0;
    __syncthreads();
    // What is 0, or has a logit of -inf, is never drawn; where nothing is filtered, nothing is collected.
    float bound = kLogits ? -3.4028234663852886e38f : __uint_as_float(1);
    if (!f.top_k.on && !f.has_min_p) bound = INFINITY;
#pragma unroll 1
    for (int which = 0; has(which); which += 2) {
      Chunk one, other;
      load<kLogits>(one, other, source, which);
      if constexpr (!kLogits) {
        const float sum = pair_sum(one, other, [](float x) { return x; });
        if ((lane_id() & 15) == 0 && (lane_id() == 0 || has(which + 1))) sums()[chunk(which + (lane_id() >> 4))] = sum;
      }
      const float own = larger<true>(lane_max<true>(one), lane_max<true>(other));
      const uint32_t pair_most = __reduce_max_sync(kWarp, Key::key(own));
      const bool is_nan = __any_sync(kWarp, own != own);
      if (lane_id() == 0) {
        atomicMax(most, pair_most);
        if (is_nan) most[1] = 1;
      }
      if (which == 0) {  // all warps have a first pair
        if (f.top_k.on) {
          const uint32_t reached = reached_by(Key::key(own), static_cast<uint32_t>(f.top_k.k));
          bound = fmaxf(bound, kLogits ? Signed::real(reached) : __uint_as_float(reached));
        }
        __syncthreads();
      }
      if (f.has_min_p) {
        const float known = __uint_as_float(*static_cast<volatile uint32_t*>(most));
        bound = fmaxf(bound, shares ? share * known : known);
      }
      collect<Key>(one, other, which, bound);
    }
    __syncthreads();
    if (most[1] != 0) return NAN;
    return kLogits ? Signed::real(most[0]) : __uint_as_float(most[0]);
  }

  // What is collected becomes change(key).
  template <typename F>
  __device__ __forceinline__ void change(const F& f) const {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < scratch().counter; i += blockDim.x) keys()[i] = __float_as_uint(f(keys()[i]));
    __syncthreads();
  }

  // Sums of what is collected and at least t.
  __device__ __forceinline__ void sum_collected(float t) {
    e.sums_at ^= 1;
#pragma unroll 1
    for (int which = 0; has(which); which += 2) {
      const uint32_t begin = begins()[2 * pair_of(which)], end = begin + begins()[2 * pair_of(which) + 1];
      for (int second = 0; second < 2 && has(which + second); ++second) {
        float sum = 0;
        bool kept = false;
        for (uint32_t i = begin + lane_id(); i < end; i += 32)
          kept |= __uint_as_float(keys()[i]) >= t && places()[i] / kSumChunk == second;
        if (__any_sync(kWarp, kept)) {
          float* x = filled() + part_start(0);
          __syncwarp();
#pragma unroll
          for (int j = 0; j < 4; ++j) *reinterpret_cast<float4*>(x + 128 * j) = make_float4(0, 0, 0, 0);
          __syncwarp();
          for (uint32_t i = begin + lane_id(); i < end; i += 32) {
            const float value = __uint_as_float(keys()[i]);
            const int place = places()[i];
            if (value >= t && place / kSumChunk == second) filled()[place % kSumChunk] = value;
          }
          __syncwarp();
          Chunk all;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float4 four = *reinterpret_cast<const float4*>(x + 128 * j);
            all.at[j][0] = four.x, all.at[j][1] = four.y, all.at[j][2] = four.z, all.at[j][3] = four.w;
          }
          sum = chunk_sum(all);
        }
        if (lane_id() == 0) sums()[chunk(which + second)] = sum;
      }
    }
    __syncthreads();
  }

  // The same of the row, which is read again.
  __device__ __forceinline__ void sum_again(const Source& source, float t) {
    e.sums_at ^= 1;
#pragma unroll 1
    for (int which = 0; has(which); which += 2) {
      Chunk one, other;
      load<false>(one, other, source, which);
      const float sum = pair_sum(one, other, [t](float x) { return x >= t ? x : 0.0f; });
      if ((lane_id() & 15) == 0 && (lane_id() == 0 || has(which + 1))) sums()[chunk(which + (lane_id() >> 4))] = sum;
    }
    __syncthreads();
  }

  __device__ __forceinline__ double kept_from(uint32_t key, const Totals& row) {
    sum_collected(__uint_as_float(key));
    return totals(row.fixed).real();
  }

  // The largest key in [least, most] from which on there is a share p of the row, which there is from `least` on.
  __device__ __forceinline__ uint32_t top_p_among(const Gathered& all, double p, const Totals& row, uint32_t least,
                                                  uint32_t most) {
    if (!(p > 0)) return most;
    const double wanted = p * row.real();
    const Weights weights = Weights::of(most, e.n);
    const Edge edge = among<true>(all, least, most, static_cast<uint64_t>(ceil(wanted * weights.real())), weights);
    const double kept = kept_from(edge.key, row), edges = static_cast<double>(edge.value) / weights.real();
    if (kept >= wanted && kept - edges < wanted) return edge.key;
    // Those sums were rounded.
    uint32_t low = least, high = most + 1;
    for (;;) {
      int between = 0;
      for (uint32_t i = threadIdx.x; i < all.total; i += blockDim.x) between |= keys()[i] > low && keys()[i] < high;
      if (!__syncthreads_or(between)) return low;
      const uint32_t middle = low + (high - low) / 2;
      kept_from(middle, row) >= wanted ? low = middle : high = middle;
    }
  }
};

// Rows of which too much may be kept.
__device__ inline __noinline__ void sample_again(const SampleParams& p, const Source& source, int64_t row) {
  Engine<false> e = Engine<false>::of(p.vocab_size);
  set_scratch([&](Scratch& s) { s.source = source, s.stage = {}, s.has_minus = false; });
  Totals totals{{1, 1}, 0, false};
  const float t = prepare_row(p, e, Filters::of(p, row, row), totals);
  draw_run(p, e, row, row + 1, totals, t);
}

template <bool kLogits>
__global__ void __launch_bounds__(kHeldThreads, kFewBlocks) few_kernel(const __grid_constant__ SampleParams p) {
  const int64_t row = blockIdx.x;
  FewRow x;
  x.e = Engine<false>::of(p.vocab_size);
  wait_for_inputs();
  let_next_start();
  const Source source = Source::of(p.input, row * p.input.stride, p.vocab_size);
  const Filters f = Filters::of(p, row, row);
  const float largest = x.stream<kLogits>(source, f);
  const uint32_t total = scratch().counter;
  const Gathered all{total <= kCollected, total, lane_id() == 0 ? total : 0};
  if (f.top_k.on && !all.room) return sample_again(p, source, row);
  const uint64_t k = f.top_k.k;
  float t = 0;
  Totals totals{{1, 1}, 0, false};
  if constexpr (kLogits) {
    Exponential exponential{-INFINITY, largest, exponent_scale(f.temperature)};
    Normalizer by{1, 1};
    if (largest == largest && f.valid()) {
      exponential.least = Signed::real(x.among<false>(all, 0, Signed::key(largest), k, {}).key);
      x.change([&](uint32_t key) { return exponential(Signed::real(key)); });
      x.sum_collected(0);
      totals = x.totals();
    }
    if (totals.valid) {
      by = Normalizer::of(totals.real());
      x.change([&](uint32_t key) { return by(__uint_as_float(key)); });
      x.sum_collected(0);
      totals = x.totals();
    }
    if (totals.valid && f.has_top_p) {
      const uint32_t most = __float_as_uint(by(exponential(largest)));
      t = __uint_as_float(x.top_p_among(all, f.top_p, totals, 1, most));
      x.sum_collected(t);
      totals.total = x.totals(totals.fixed).total;
    }
    return x.draw_from(source, -INFINITY, p, row, totals, t, [&](float l) { return by(exponential(l)); });
  } else {
    totals = x.totals();
    totals.valid = totals.valid && f.valid();
    float cut = 0;
    Normalizer by{1, 1};
    bool rescaled = false;
    if (totals.valid && (f.top_k.on || f.has_min_p)) {
      if (f.has_min_p) t = f.min_p >= 1 ? largest : static_cast<float>(f.min_p) * largest;
      if (f.top_k.on) {
        t = fmaxf(t, __uint_as_float(x.among<false>(all, 0, __float_as_uint(largest), k, {}).key));
        if (f.has_top_p) {
          x.sum_collected(t);
          const Totals kept = x.totals(totals.fixed);
          uint32_t least = __float_as_uint(t), most = __float_as_uint(largest);
          if (p.top_k_first) {
            rescaled = true, cut = t, by = Normalizer::of(kept.real());
            const DType dtype = p.input.dtype;
            const auto change = [&](float value) { return value >= cut ? rounded(by(value), dtype) : 0.0f; };
            x.change([&](uint32_t key) { return change(__uint_as_float(key)); });
            x.sum_collected(0);
            totals = x.totals();
            least = __float_as_uint(change(t)), most = __float_as_uint(change(largest));
            t = 0;
          }
          if (rescaled || kept.real() >= f.top_p * totals.real())
            t = fmaxf(t, __uint_as_float(x.top_p_among(all, f.top_p, totals, least, most)));
        }
      }
      all.room ? x.sum_collected(t) : x.sum_again(source, t);
      const Totals kept = x.totals(totals.fixed);
      totals.total = kept.total, totals.valid = kept.valid;
    }
    x.draw_from(source, 0.0f, p, row, totals, t, [&](float value) {
      value = max_nan(value, 0.0f);
      return rescaled ? (value >= cut ? rounded(by(value), p.input.dtype) : 0.0f) : value;
    });
  }
}

}  // namespace flashinfer::cuda
