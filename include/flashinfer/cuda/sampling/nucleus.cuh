// Thresholds of top-p in one read of a row, which a block has to itself.
//
// A sample of the row says between which numbers the threshold lies (nucleus_read.cuh has what is done with those).
// Where it is not there, or too much is, the row is read once more with an interval from the sums of the first read;
// where that does not do either, sums of bins narrow it.
#pragma once

#include <flashinfer/cuda/sampling/nucleus_read.cuh>

namespace flashinfer::cuda {

constexpr int kWanted = kAside * 7 / 10;                 // elements that an interval is made for
constexpr int kSampled = kNucleusWarps * 2 * kSumChunk;  // elements: the first pair of chunks of each warp

// What a read of the row has led to.
enum class Outcome { kFound, kAbove, kBelow, kTooMuch };
struct Resolved {
  Outcome outcome;
  float t;
  uint64_t kept;  // the sum of what is at least the threshold, where it is found
  double sum;     // of what is at least the interval's high, or low, where the threshold is above, or below
};

// Keys between which the threshold is known to be, and the sum of what has a key of at least `high`. That what has a
// key of at least `low` is enough is known of `sure`, which is not above it.
struct Bounds {
  uint32_t low, high, sure;
  int missed;  // intervals since one had too much
  double sum;

  // A chunk's sum is not below its elements.
  __device__ static Bounds all(FixedPoint fixed) {
    return {1, __float_as_uint(static_cast<float>(fmin(fixed.down * 0x1p48, 0x1p128))), 1, 0, 0};
  }
  __device__ void learn(const Interval& interval, const Resolved& result) {
    const uint32_t from = __float_as_uint(interval.low), to = __float_as_uint(interval.high);
    if (result.outcome == Outcome::kAbove) {
      low = sure = to;
    } else {
      high = min(high, result.outcome == Outcome::kBelow ? from : to), sum = result.sum;
      if (result.outcome == Outcome::kTooMuch) low = from;
    }
    if (low >= high) low = sure;
    missed = result.outcome == Outcome::kTooMuch ? 0 : missed + 1;
  }
  __device__ bool is_one() const { return high - low == 1; }
};

// What the threads of a block know of a row, from read to read.
struct Known {
  double sample;                 // the sample's sum; 0 where it says nothing
  Normalizer share;              // from an element of the sample to its weight
  int base;                      // of bins
  uint32_t from_high, from_low;  // the sample's weights of what is at least the interval's ends
  double p, wanted;
  Totals row;
  Bounds bounds;
};
__device__ __forceinline__ Known& known() {
  __shared__ Known shared;
  return shared;
}

struct NucleusRow : NucleusRead {
  using NucleusRead::NucleusRead;

  __device__ __forceinline__ static uint32_t weight_of(float x, Normalizer share) {
    // Rounded by an addition, unless the integer takes more than 23 bits.
    const float raised = x * share.up, sum = fmaf(raised, share.inverse, 0x1p23f);
    return sum < 0x1p24f ? __float_as_uint(sum) & 0x7fffffu : __float2uint_rn(raised * share.inverse);
  }
  // The least key of a bin: six bits of the mantissa.
  __device__ __forceinline__ static float edge(int base, int bin) {
    const int octave = base + bin;
    return __uint_as_float(octave < 0 ? 0u : min(static_cast<uint32_t>(octave) << 17, 0x7f800000u));
  }

  // Weights of the sample's elements, 2^30 in all, into bins.
  __device__ __forceinline__ void look(const Chunk (&pair)[2]) {
    float own = 0, most = 0;
    const auto see = [&](const Chunk& x) {
#pragma unroll
      for (int i = 0; i < 16; ++i) own += max_nan(x.at[i / 4][i % 4], 0.0f), most = fmaxf(most, x.at[i / 4][i % 4]);
    };
    see(pair[0]), see(pair[1]);
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) own += __shfl_xor_sync(kWarp, own, apart);
    const uint32_t key = __reduce_max_sync(kWarp, __float_as_uint(most));
    float* parts = maxima();
    if (lane_id() == 0) parts[e.warp()] = own, parts[kNucleusWarps + e.warp()] = __uint_as_float(key);
    for (int i = threadIdx.x; i < kSampleBins; i += blockDim.x) sample()[i] = 0;
    __syncthreads();
    own = parts[lane_id() & (kNucleusWarps - 1)];
#pragma unroll
    for (int apart = kNucleusWarps / 2; apart > 0; apart /= 2) own += __shfl_xor_sync(kWarp, own, apart);
    const int base = static_cast<int>(e.largest_bits(parts + kNucleusWarps, kNucleusWarps) >> 17) - (kSampleBins - 1);
    const double mass = own > 0 && own < INFINITY ? own : 0;
    const Normalizer share = Normalizer::of(mass * 0x1p-30);
    if (threadIdx.x == 0) known().sample = mass, known().share = share, known().base = base;
    const auto add = [&](const Chunk& x) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float value = fmaxf(x.at[i / 4][i % 4], 0.0f);
        const uint32_t weight = weight_of(value, share);
        if (weight != 0) atomicAdd(sample() + max(static_cast<int>(__float_as_uint(value) >> 17) - base, 0), weight);
      }
    };
    if (mass != 0) add(pair[0]), add(pair[1]);
    __syncthreads();
  }

  // Around where the sample's weights from the top on reach `need`: as many elements on both sides as make `count` of
  // the row, or all from the top on. `least` is a number that the threshold is not below.
  __device__ __forceinline__ Interval around(uint32_t need, int count, float least) const {
    const Normalizer share = known().share;
    const int base = known().base;
    const auto bin_of = [](int i) { return kSampleBins - 1 - 4 * static_cast<int>(threadIdx.x) - i; };
    // A bin's weight, and 16 times the number of elements that it takes, in one word.
    uint64_t words[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bin = bin_of(i);
      const uint32_t weight = sample()[bin];
      const float each = 0.5f * (edge(base, bin) + edge(base, bin + 1)) * share.up * share.inverse;
      const float elements = bin == 0 ? 0.0f : fminf(static_cast<float>(weight) / fmaxf(each, 0.5f), kSampled);
      words[i] = static_cast<uint64_t>(weight) << 32 | __float2uint_rn(16 * elements);
      own += words[i];
    }
    const uint64_t end = warp_ends(own);
    Scratch& s = scratch();
    __syncthreads();
    if (lane_id() == 31) s.warp_totals[e.warp()] = end;
    if (threadIdx.x == 0) {
      s.counts[0] = 0, s.counts[1] = __float_as_uint(least), s.counts[2] = __float_as_uint(INFINITY);
      known().from_high = 0, known().from_low = 1u << 30;
    }
    __syncthreads();
    const uint64_t one = lane_id() < kNucleusWarps ? s.warp_totals[lane_id()] : 0;
    const uint64_t total = warp_sum(one), start = warp_sum(lane_id() < e.warp() ? one : 0) + end - own;
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
    const uint32_t middle = s.counts[0], around = static_cast<uint32_t>(16 * int64_t{count} * kSampled / e.n) / 2;
    const bool from_top = middle <= around + around / 2;
    const uint32_t from = from_top ? 0 : middle - around, to = from_top ? 2 * around : middle + around;
    at = start;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int bin = bin_of(i);
      const uint64_t next = at + words[i];
      const uint32_t begin = static_cast<uint32_t>(at), behind = static_cast<uint32_t>(next);
      if (!from_top && begin <= from && from < behind)
        s.counts[2] = __float_as_uint(edge(base, bin + 1)), known().from_high = at >> 32;
      if (begin < to && to <= behind && edge(base, bin) > least)
        s.counts[1] = __float_as_uint(edge(base, bin)), known().from_low = next >> 32;
      at = next;
    }
    __syncthreads();
    return {__uint_as_float(s.counts[1]), __uint_as_float(s.counts[2])};
  }

  // A key of [low, high] from which on there is `missing` of what is aside, as far as rounded weights say, and the sum
  // of the elements that have it: bins, until one has few.
  struct Candidate {
    uint32_t key;
    double sum;
  };
  __device__ __forceinline__ Candidate search(uint32_t count, uint32_t low, uint32_t high, double missing) const {
    // Weights up to 2^17: of all that is aside less than 2^32.
    static_assert(4 * kAside < 1 << 15);
    const int exponent = static_cast<int>(high >> 23) - 127, up = 16 - exponent;
    const Weights weights{static_cast<float>(power_of_two(up / 2)), static_cast<float>(power_of_two(up - up / 2)), 0};
    const auto sum_of = [&](uint32_t key, uint32_t number) { return number * double{__uint_as_float(key)}; };
    auto need = static_cast<uint32_t>(fmin(fmax(ceil(missing * weights.real()), 1.0), 0x1p32 - 1));
    uint32_t* words = bins();
    uint32_t& few = scratch().counts[3];
    for (;;) {
      Bins<kBins> parted(low, high);
      if (threadIdx.x == 0) few = 0;
      clear(words, kBins);
      each_aside(count, [&](float x) {
        const uint32_t key = __float_as_uint(x);
        if (parted.holds(key)) atomicAdd(words + parted.of(key), weights(x));
      });
      __syncthreads();
      const int bin = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
      const uint64_t values[2] = {words[bin], words[bin - 1]};
      const Found found = find(values, need, kBins - 1);
      need = need > found.above ? need - static_cast<uint32_t>(found.above) : 1;
      parted.narrow(kBins - 1 - found.position);
      low = parted.low, high = parted.high;
      if (low == high) {
        const uint32_t weight = weights(__uint_as_float(low));
        return {low, sum_of(low, weight == 0 ? 0 : static_cast<uint32_t>(found.value) / weight)};
      }
      each_aside(count, [&](float x) {
        const uint32_t key = __float_as_uint(x);
        if (!parted.holds(key)) return;
        const uint32_t at = ptx::atomic_add_shared(ptx::shared_address(&few), 1);
        if (at < 32) words[at] = key;
      });
      __syncthreads();
      const uint32_t number = few;
      if (number <= 32) {
        const uint32_t own = lane_id() < number ? words[lane_id()] : 0, weight = weights(__uint_as_float(own));
        uint32_t reach = 0;
        for (uint32_t i = 0; i < number; ++i) {
          const uint32_t key = __shfl_sync(kWarp, own, i), more = __shfl_sync(kWarp, weight, i);
          reach += key >= own ? more : 0;
        }
        const uint32_t enough = __reduce_max_sync(kWarp, reach >= need ? own : 0);
        const uint32_t key = enough != 0 ? enough : __reduce_min_sync(kWarp, own != 0 ? own : ~0u);
        return {key, sum_of(key, __popc(__ballot_sync(kWarp, own == key)))};
      }
      __syncthreads();
    }
  }

  // The largest key of what is aside and below `high`.
  __device__ __forceinline__ uint32_t largest_aside(uint32_t count, float high) const {
    if (threadIdx.x == 0) scratch().counts[0] = 0;
    __syncthreads();
    uint32_t most = 0;
    each_aside(count, [&](float x) { most = max(most, x < high ? __float_as_uint(x) : 0u); });
    most = __reduce_max_sync(kWarp, most);
    if (lane_id() == 0) atomicMax(&scratch().counts[0], most);
    __syncthreads();
    return scratch().counts[0];
  }

  // The largest number from which on there is `wanted`, if it lies in the interval. Sums are those of what it keeps.
  __device__ __forceinline__ Resolved resolve(const Interval& interval, double wanted, FixedPoint fixed) {
    const uint32_t count = scratch().counter;
    const double above = fixed.real(sum_groups(fixed));
    if (above >= wanted) return {Outcome::kAbove, 0, 0, above};
    if (count > kAside) return {Outcome::kTooMuch, 0, 0, above};
    const uint32_t least = __float_as_uint(interval.low);
    const uint32_t most =
        interval.high < INFINITY ? __float_as_uint(interval.high) - 1 : largest_aside(count, interval.high);
    if (most < least) return {Outcome::kBelow, 0, 0, above};
    const auto sum_of = [&](uint32_t key) { return sum_from(count, __uint_as_float(key), fixed); };
    const auto found = [&](uint32_t key, uint64_t kept) {
      return Resolved{Outcome::kFound, __uint_as_float(key), kept, 0};
    };
    // Where all weights of a bin are 0 it may have no elements.
    Candidate candidate = search(count, least, most, wanted - above);
    candidate.key = min(max(candidate.key, least), most);
    const float t = __uint_as_float(candidate.key);
    const uint64_t kept = sum_of(candidate.key);
    if (is_threshold(fixed.real(kept), candidate.sum, t, wanted, fixed)) return found(candidate.key, kept);
    // Those sums were rounded.
    uint32_t low = least, high = most + 1;
    if (fixed.real(kept) >= wanted) {
      low = candidate.key;
      if (fixed.real(sum_of(low + 1)) < wanted) return found(low, sum_of(low));
      ++low;
    } else {
      high = candidate.key;
      const double all = fixed.real(sum_of(least));
      if (all < wanted) return {Outcome::kBelow, 0, 0, all};
    }
    for (;;) {
      int between = 0;
      each_aside(count, [&](float x) { between |= __float_as_uint(x) > low && __float_as_uint(x) < high; });
      if (!__syncthreads_or(between)) break;
      const uint32_t middle = low + (high - low) / 2;
      fixed.real(sum_of(middle)) >= wanted ? low = middle : high = middle;
    }
    return found(low, sum_of(low));
  }

  // The part of what lies between bounds which the sums of bins say has the threshold, by a read of its own.
  template <typename T>
  __device__ __noinline__ static Interval narrower(int n, const T* source) {
    const NucleusRow x(n);
    const Bounds bounds = known().bounds;
    if (bounds.is_one()) return {INFINITY, __uint_as_float(bounds.low)};
    constexpr int kCount = kSampleBins / 2;
    Bins<kCount> parted(bounds.low, bounds.high - 1);
    const Weights weights = Weights::of(bounds.high - 1, x.e.n);
    uint32_t* words = x.sample();
    __syncthreads();
    clear(words, kSampleBins);
#pragma unroll 1
    for (int at = 0; at < x.own_pairs; ++at) {
      Chunk pair[2];
      x.load<true>(pair, source, at);
      for (Chunk& chunk : pair) {
        chunk.each([&](float& value) {
          const uint32_t key = __float_as_uint(value);
          if (parted.holds(key)) weights.add(words + 2 * parted.of(key), value);
        });
      }
    }
    __syncthreads();
    uint64_t values[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t* pair = words + 2 * (kCount - 1 - 2 * static_cast<int>(threadIdx.x) - i);
      values[i] = weights.sum(pair[0], pair[1]);
    }
    const auto need = static_cast<uint64_t>(ceil(fmax(known().wanted - bounds.sum, 0.0) * weights.real()));
    parted.narrow(kCount - 1 - find(values, need, kCount - 1).position);
    // Sums of bins are rounded: where that has misled more than twice, neighbours belong to it.
    const uint64_t more = (uint64_t{1} << 2 * min(max(bounds.missed - 2, 0), 16)) - 1;
    const uint64_t wider = more * (parted.high + 1 - parted.low);
    const auto low = static_cast<uint32_t>(parted.low - min(wider, uint64_t{parted.low - bounds.low}));
    const auto high = static_cast<uint32_t>(parted.high + 1 + min(wider, uint64_t{bounds.high - 1 - parted.high}));
    return {__uint_as_float(low), __uint_as_float(high)};
  }

  // Smaller elements have less than what may be missing of a row of this mass or more, all together.
  __device__ __forceinline__ float least(double p, double mass) const {
    return fmaxf(static_cast<float>((1 - fmax(p, 0.0)) * mass / e.n * 0.999), __uint_as_float(1));
  }

  __device__ __noinline__ static Interval first_interval(int n) {
    const NucleusRow x(n);
    const Known& k = known();
    if (!(k.sample > 0)) return {__uint_as_float(1), INFINITY};
    return x.around(static_cast<uint32_t>(fmax(k.p, 0.0) * 0x1p30), kWanted, x.least(k.p, k.sample));
  }
  // From the sample's weight where the sum is known to what is wanted.
  __device__ __noinline__ static Interval second_interval(int n, Outcome outcome, double sum) {
    const NucleusRow x(n);
    const Known& k = known();
    const double scale = kSampled / (x.e.n * k.sample * 0x1p-30);
    const double need = (outcome == Outcome::kBelow ? k.from_low : k.from_high) + (k.wanted - sum) * scale;
    return x.around(static_cast<uint32_t>(fmin(fmax(need, 1.0), 0x1p30)),
                    outcome == Outcome::kTooMuch ? kWanted / 3 : kWanted, x.least(k.p, k.row.real()));
  }

  // What a read has led to. The row's sums are those of what is at least the threshold where it is found.
  __device__ __noinline__ static Resolved resolve_of(int n, Interval interval) {
    NucleusRow x(n);
    if (interval.low == INFINITY) {
      return {Outcome::kFound, interval.high, x.sum_groups(known().row.fixed), 0};
    }
    return x.resolve(interval, known().wanted, known().row.fixed);
  }

  // Of the row: its sums, and the threshold with the sums of what it keeps. With kAgain the row is read again behind
  // this.
  template <bool kAgain, typename T>
  __device__ __forceinline__ float filter(const T* source, const T* next, double p, Totals& row) {
    Chunk even[2], odd[2];
    load<kAgain>(even, source, 0), load<kAgain>(odd, source, 1);
    Interval interval{INFINITY, 0};
    if (threadIdx.x == 0) known().p = p;
    if (!(p >= 1)) {
      look(even);
      interval = first_interval(e.n);
    }
    for (bool is_first = true;; is_first = false) {
      pass<kAgain>(even, odd, source, is_first ? next : nullptr, interval);
      const double wanted_share = known().p;
      if (is_first) {
        Totals all = totals();
        all.valid = all.valid && wanted_share == wanted_share;
        if (!all.valid || wanted_share >= 1) {
          row = all;
          return 0;
        }
        if (threadIdx.x == 0) {
          known().row = all, known().wanted = (wanted_share > 0 ? wanted_share : 1e-30) * all.real();
          known().bounds = Bounds::all(all.fixed);
        }
        __syncthreads();
      }
      const Resolved result = resolve_of(e.n, interval);
      if (result.outcome == Outcome::kFound) {
        row = known().row;
        row.total = result.kept;
        return result.t;
      }
      if (threadIdx.x == 0) known().bounds.learn(interval, result);
      __syncthreads();
      const bool again = is_first && known().sample > 0 && !known().bounds.is_one();
      interval = again ? second_interval(e.n, result.outcome, result.sum) : narrower(e.n, source);
      load<kAgain>(even, source, 0), load<kAgain>(odd, source, 1);
    }
  }
};

}  // namespace flashinfer::cuda
