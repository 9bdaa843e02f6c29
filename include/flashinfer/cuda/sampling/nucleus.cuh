// Draws by top-p: a row is read twice. The first two pairs of each warp, from eight places of the row, give an interval
// that should have the threshold in it. The first pass sums the row and what lies above the interval, and collects what
// lies in it; among that the threshold is found. The second pass, backwards, as what was read last is nearest, has the
// sums of what is kept, and tells whether the threshold was right.
#pragma once

#include <flashinfer/cuda/sampling/stream.cuh>

namespace flashinfer::cuda {

struct NucleusRow : StreamRow {
  // Keys in [low, high) are collected; high is infinity's where what is collected has the largest.
  struct Interval {
    uint32_t low, high;
  };
  static constexpr uint32_t kInfinity = 0x7f800000u;

  // Sums over bins of a sample, of one bin or of all from the top.
  struct Sample {
    float count, mass, square;

    __device__ __forceinline__ Sample operator+(const Sample& o) const {
      return {count + o.count, mass + o.mass, square + o.square};
    }
  };

  // Exponent and six bits of the mantissa, of the 16 octaves up to the largest of the sample.
  struct Fine {
    int base;

    __device__ __forceinline__ int of(uint32_t key) const { return min(max(static_cast<int>(key >> 17) - base, 0), kBins - 1); }
    __device__ __forceinline__ uint32_t low(int bin) const {
      return bin == 0 || base + bin <= 0 ? 1u : static_cast<uint32_t>(base + bin) << 17;
    }
  };

  template <typename F>
  __device__ __forceinline__ void each_of_sample(const Source& source, const F& f) const {
#pragma unroll 1
    for (int pair = 0; pair < 2; ++pair) {
      Chunk one, other;
      take(one, other, source, pair, step + pair, 0.0f);
      one.each([&](float& x) { f(x); });
      other.each([&](float& x) { f(x); });
    }
  }

  // Four standard deviations of the sample's mass above a number to both sides of p; or, where that is too wide or
  // nothing, the largest elements, as many as there is room for.
  __device__ __forceinline__ Interval guess(const Source& source, float p) const {
    constexpr int kEach = kBins / kHeldThreads;
    ptx::cp_async_wait<0>();
    uint32_t* words = bins();
    uint32_t* most = scratch().counts;  // key of the sample's largest; three positions
    if (threadIdx.x == 0) most[0] = 1, most[1] = kBins, most[2] = 0, most[3] = 0, scratch().counter = 0;
    clear(words, kBins);
    float own = 0;
    each_of_sample(source, [&](float x) { own = fmaxf(own, x); });
    const uint32_t own_most = __reduce_max_sync(kWarp, __float_as_uint(own));
    if (lane_id() == 0) atomicMax(most, own_most);
    __syncthreads();
    const Fine fine{static_cast<int>(most[0] >> 17) - (kBins - 1)};
    each_of_sample(source, [&](float x) {
      if (x > 0) atomicAdd(words + fine.of(__float_as_uint(x)), 1u);
    });
    __syncthreads();
    // From the top: a thread's bins, and what lies before them.
    const float down = 1.0f / __uint_as_float(most[0] & 0x7f800000u ? most[0] & 0x7f800000u : 0x00800000u);
    Sample mine[kEach], end{0, 0, 0};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int bin = kBins - 1 - (kEach * static_cast<int>(threadIdx.x) + i);
      const float count = static_cast<float>(words[bin]);
      const float middle = __uint_as_float(fine.low(bin) + (1u << 16)) * down;
      mine[i] = {count, count * middle, count * middle * middle};
      end = end + mine[i];
    }
    const Sample sum = end;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const Sample before{__shfl_up_sync(kWarp, end.count, apart), __shfl_up_sync(kWarp, end.mass, apart),
                          __shfl_up_sync(kWarp, end.square, apart)};
      if (lane_id() >= apart) end = end + before;
    }
    Sample* warps = reinterpret_cast<Sample*>(maxima());
    if (lane_id() == 31) warps[e.warp()] = end;
    __syncthreads();
    Sample above{end.count - sum.count, end.mass - sum.mass, end.square - sum.square}, total{0, 0, 0};
#pragma unroll
    for (int w = 0; w < kHeldWarps; ++w) {
      if (w < e.warp()) above = above + warps[w];
      total = total + warps[w];
    }
    const float limit = total.count * (0.6f * kCollectedKeys) / static_cast<float>(e.n);
    const auto deviation = [&](const Sample& part) {
      const float rest = fmaxf(total.square - part.square, 0.0f);
      return 4 * sqrtf((1 - p) * (1 - p) * part.square + p * p * rest);
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int position = kEach * static_cast<int>(threadIdx.x) + i;
      const Sample with = above + mine[i];
      words[kBins - 1 - position] = __float_as_uint(with.count);
      if (with.mass >= p * total.mass + deviation(with)) atomicMin(most + 1, static_cast<uint32_t>(position));
      if (with.mass <= p * total.mass - deviation(with)) atomicMax(most + 2, static_cast<uint32_t>(position) + 1);
      if (with.count <= limit) atomicMax(most + 3, static_cast<uint32_t>(position) + 1);
      above = with;
    }
    __syncthreads();
    // Positions from the top: `last` of the interval, and how many lie above it; how many bins have few elements.
    const int last = min(static_cast<int>(most[1]), kBins - 1), start = most[2], few = most[3];
    bool interval = start <= last && last >= few;
    if (interval) {
      const float until = __uint_as_float(words[kBins - 1 - last]);
      const float from = start > 0 ? __uint_as_float(words[kBins - start]) : 0.0f;
      interval = until - from <= 1.4f * limit;
    }
    if (!interval) return {fine.low(few > 0 ? kBins - few : kBins - 1), kInfinity};
    return {fine.low(kBins - 1 - last), start > 0 ? fine.low(kBins - start) : kInfinity};
  }

  // The elements of the interval are collected. The sum of larger ones.
  __device__ __forceinline__ double collect(const Source& source, Interval in) {
    const float low = __uint_as_float(in.low), high = __uint_as_float(in.high);
    double larger = 0;
    pass<false>(source, Source{}, 0, 0.0f, [&](Chunk& one, Chunk& other, int pair) {
      one.each([](float& x) { x = max_nan(x, 0.0f); });
      other.each([](float& x) { x = max_nan(x, 0.0f); });
      put_sums(sums(), pair, pair_sum(one, other, [](float x) { return x; }));
      if (in.high != kInfinity) larger += pair_sum(one, other, [high](float x) { return x >= high ? x : 0.0f; });
      uint32_t found = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (one.at[i / 4][i % 4] >= low && one.at[i / 4][i % 4] < high) found |= 1u << i;
        if (other.at[i / 4][i % 4] >= low && other.at[i / 4][i % 4] < high) found |= 1u << (16 + i);
      }
      const Span span = span_of(found);
      if (span.all == 0 || span.base + span.all > kCollectedKeys) return;
      uint32_t* to = keys() + span.at;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (found >> i & 1) *to++ = __float_as_uint(one.at[i / 4][i % 4]);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (found >> (16 + i) & 1) *to++ = __float_as_uint(other.at[i / 4][i % 4]);
    });
    double* parts = reinterpret_cast<double*>(maxima());
    if ((lane_id() & 15) == 0) parts[2 * e.warp() + (lane_id() >> 4)] = larger;
    __syncthreads();
    larger = 0;
#pragma unroll
    for (int i = 0; i < 2 * kHeldWarps; ++i) larger += parts[i];
    return larger;
  }

  // The nearest collected key above, or below, and 0 where there is none.
  template <bool kAbove>
  __device__ __forceinline__ uint32_t next_key(uint32_t count, uint32_t key) const {
    uint32_t own = kAbove ? 0xffffffffu : 0;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      const uint32_t other = keys()[i];
      if (kAbove && other > key) own = min(own, other);
      if (!kAbove && other < key) own = max(own, other);
    }
    uint32_t* nearest = scratch().counts;
    __syncthreads();
    if (threadIdx.x == 0) *nearest = kAbove ? 0xffffffffu : 0;
    __syncthreads();
    kAbove ? atomicMin(nearest, own) : atomicMax(nearest, own);
    __syncthreads();
    return *nearest == 0xffffffffu ? 0 : *nearest;
  }
};

// The sums of a row that is not filtered.
__device__ __forceinline__ Totals sum_row(StreamRow& x, const Source& source, const Source& next, int ahead) {
  x.pass<false>(source, next, ahead, 0.0f, [&](Chunk& one, Chunk& other, int pair) {
    x.put_sums(x.sums(), pair, pair_sum(one, other, [](float l) { return max_nan(l, 0.0f); }));
  });
  __syncthreads();
  return x.totals();
}

// The same by passes without copies, for rows of which the interval was wrong.
__device__ inline __noinline__ float find_again(const Source& source, double p, const Totals& row) {
  Engine<false> e = Engine<false>::of(source.n);
  set_scratch([&](Scratch& s) { s.source = source, s.stage = {}, s.has_minus = false; });
  const float t = top_p_threshold(e, p, row, e.largest());
  __syncthreads();
  return t;
}

// The threshold of a row with totals, and sums of what it keeps. Whether the row was read backwards, with the copies of
// `ahead` pairs behind.
__device__ __forceinline__ bool find_nucleus(NucleusRow& x, double p, const Source& source, const Source& next,
                                             int ahead, Totals& totals, float& t) {
  const NucleusRow::Interval in = x.guess(source, static_cast<float>(p));
  const double larger = x.collect(source, in);
  totals = x.totals();
  if (!totals.valid) return false;
  const auto keep = [&](float from) {
    x.sum_again(source, from);
    return x.totals(totals.fixed);
  };
  const auto search_again = [&] {
    t = find_again(source, p, totals);
    totals.total = keep(t).total;
  };
  const uint32_t count = scratch().counter;
  const double wanted = p * totals.real();
  if (count == 0 || count > kCollectedKeys || (in.high != x.kInfinity && larger >= wanted)) {
    search_again();
    return false;
  }
  const uint32_t most = in.high != x.kInfinity ? in.high - 1 : x.next_key<false>(count, in.high);
  const Weights weights = Weights::of(most, x.e.n);
  const double need = ceil((wanted - larger) * weights.real());
  const Edge edge = x.search<true>(x, count, in.low, most, need > 1 ? static_cast<uint64_t>(need) : 1, weights);
  t = __uint_as_float(edge.key);
  x.e.sums_at ^= 1, x.turn();
  x.pass<true>(source, next, ahead, 0.0f, [&](Chunk& one, Chunk& other, int pair) {
    x.put_sums(x.sums(), pair, pair_sum(one, other, [t](float l) { return l >= t ? l : 0.0f; }));
  });
  __syncthreads();
  Totals kept = x.totals(totals.fixed);
  const double edges = static_cast<double>(edge.value) / weights.real();
  if (p > 0 && !(kept.real() >= wanted && kept.real() - edges < wanted)) {
    // Sums were rounded: neighbours, until the one above has too little.
    uint32_t key = edge.key;
    if (kept.real() >= wanted) {
      for (;;) {
        const uint32_t above = x.next_key<true>(count, key);
        const bool ends = above == 0 && in.high == x.kInfinity;
        if (ends || keep(__uint_as_float(above != 0 ? above : in.high)).real() < wanted) break;
        key = above;
        if (key == 0) break;
      }
    } else {
      do key = x.next_key<false>(count, key);
      while (key != 0 && keep(__uint_as_float(key)).real() < wanted);
    }
    if (key == 0) {
      search_again();
      return true;
    }
    t = __uint_as_float(key), kept = keep(t);
  }
  totals.total = kept.total;
  return true;
}

}  // namespace flashinfer::cuda
