// Thresholds of top-p in one read of a row by one CTA.
//
// A sample of the row gives an interval for the threshold (nucleus_sample.cuh). A read of the row collects
// the elements of the interval (nucleus_read.cuh). If the threshold is outside, or if the interval has too
// many elements, the sums of the first read give a second interval, and the row is read again. If that fails
// too, sums of bins narrow the interval.
#pragma once

#include <flashinfer/cuda/sampling/nucleus_sample.cuh>

namespace flashinfer::cuda {

struct NucleusRow : NucleusSample {
  using NucleusSample::NucleusSample;

  // A key and the sum of the elements with that key.
  struct Candidate {
    uint32_t key;
    double sum;
  };
  // Return the largest key of [low, high] such that collected elements with this or a larger key sum to at
  // least `missing`, in rounded weights. Levels of bins narrow the interval until a bin has few elements.
  __device__ __noinline__ static Candidate search_of(int n, uint32_t count, uint32_t low, uint32_t high,
                                                     double missing) {
    return NucleusRow(n).search(count, low, high, missing);
  }
  __device__ __forceinline__ Candidate search(uint32_t count, uint32_t low, uint32_t high, double missing) const {
    // Weights are up to 2^17, so all collected ones sum to less than 2^32.
    static_assert(4 * kCollectedGroups < 1 << 15);
    const int exponent = static_cast<int>(high >> 23) - 127, up = 16 - exponent;
    const Weights weights{static_cast<float>(power_of_two(up / 2)), static_cast<float>(power_of_two(up - up / 2)), 0};
    const auto sum_of_equal = [&](uint32_t key, uint32_t number) { return number * double{__uint_as_float(key)}; };
    auto need = static_cast<uint32_t>(fmin(fmax(ceil(missing * weights.factor()), 1.0), 0x1p32 - 1));
    uint32_t* words = bins();
    uint32_t& in_bin = scratch().counts[3];
    for (;;) {
      Bins<kBins> split(low, high);
      if (threadIdx.x == 0) in_bin = 0;
      clear(words, kBins);
      for_collected(count, [&](float x) {
        const uint32_t key = __float_as_uint(x);
        if (split.holds(key)) atomicAdd(words + split.bin_of(key), weights(x));
      });
      __syncthreads();
      const int bin = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
      const uint64_t values[2] = {words[bin], words[bin - 1]};
      const FoundBin found = find_bin(values, need, kBins - 1);
      need = need > found.above ? need - static_cast<uint32_t>(found.above) : 1;
      split.narrow(kBins - 1 - found.position);
      low = split.low, high = split.high;
      if (low == high) {
        const uint32_t weight = weights(__uint_as_float(low));
        return {low, sum_of_equal(low, weight == 0 ? 0 : static_cast<uint32_t>(found.value) / weight)};
      }
      for_collected(count, [&](float x) {
        const uint32_t key = __float_as_uint(x);
        if (!split.holds(key)) return;
        const uint32_t at = ptx::atomic_add_shared(ptx::shared_address(&in_bin), 1);
        if (at < 32) words[at] = key;
      });
      __syncthreads();
      const uint32_t number = in_bin;
      if (number <= 32) {
        const uint32_t own = lane_id() < number ? words[lane_id()] : 0, weight = weights(__uint_as_float(own));
        uint32_t reach = 0;
        for (uint32_t i = 0; i < number; ++i) {
          const uint32_t key = __shfl_sync(kAllLanes, own, i), more = __shfl_sync(kAllLanes, weight, i);
          reach += key >= own ? more : 0;
        }
        const uint32_t enough = __reduce_max_sync(kAllLanes, reach >= need ? own : 0);
        const uint32_t key = enough != 0 ? enough : __reduce_min_sync(kAllLanes, own != 0 ? own : ~0u);
        return {key, sum_of_equal(key, __popc(__ballot_sync(kAllLanes, own == key)))};
      }
      __syncthreads();
    }
  }

  // Return the largest collected key below `high`.
  __device__ __forceinline__ uint32_t largest_collected(uint32_t count, float high) const {
    if (threadIdx.x == 0) scratch().counts[0] = 0;
    __syncthreads();
    uint32_t max_key = 0;
    for_collected(count, [&](float x) { max_key = max(max_key, x < high ? __float_as_uint(x) : 0u); });
    max_key = __reduce_max_sync(kAllLanes, max_key);
    if (lane_id() == 0) atomicMax(&scratch().counts[0], max_key);
    __syncthreads();
    return scratch().counts[0];
  }

  // Return the largest threshold whose sum reaches `target`, if it lies in the interval. Afterwards the row's
  // sums are those of the kept elements.
  __device__ __forceinline__ Resolved resolve(const Interval& interval, double target, FixedPoint fixed) {
    const uint32_t count = scratch().counter;
    const double above = fixed.real(sum_of(cluster_row.n, 0, 0, fixed));
    if (above >= target) return {Outcome::kAbove, 0, 0, above};
    if (count > kCollectedGroups) return {Outcome::kTooMany, 0, 0, above};
    const uint32_t least = __float_as_uint(interval.low);
    const uint32_t max_key =
        interval.high < INFINITY ? __float_as_uint(interval.high) - 1 : largest_collected(count, interval.high);
    if (max_key < least) return {Outcome::kBelow, 0, 0, above};
    const auto sum_at = [&](uint32_t key) { return sum_of(cluster_row.n, count, __uint_as_float(key), fixed); };
    const auto found = [&](uint32_t key, uint64_t kept) {
      return Resolved{Outcome::kFound, __uint_as_float(key), kept, 0};
    };
    // Invariant: the threshold is below `high`, and at least `low` if low_suffices. Elements >= `high` do not
    // suffice; their sum is `beyond`.
    uint32_t low = least, high = max_key + 1;
    double beyond = above;
    bool low_suffices = false;  // elements >= `low` are known to suffice
    for (int iteration = 1;; ++iteration) {
      // Weights are rounded relative to the largest key, so a step that lowers `high` makes later weights
      // more exact. Every fourth step bisects, because rounded weights may choose badly for many steps.
      Candidate candidate{low + (high - low) / 2, 0};
      if (iteration % 4 != 0) candidate = search_of(cluster_row.n, count, low, high - 1, target - beyond);
      // If all weights are 0, search() may end in an empty bin and return a key outside of [low, high).
      candidate.key = min(max(candidate.key, low), high - 1);
      const uint64_t kept = sum_at(candidate.key);
      const double sum = fixed.real(kept);
      if (is_threshold(sum, candidate.sum, __uint_as_float(candidate.key), target, fixed))
        return found(candidate.key, kept);
      if (sum < target) {
        if (!low_suffices) {
          const double all = candidate.key == low ? sum : fixed.real(sum_at(low));
          if (all < target) return {Outcome::kBelow, 0, 0, all};
          low_suffices = true;
        }
        high = candidate.key, beyond = sum;
      } else {
        low = candidate.key, low_suffices = true;
        // If the next key does not suffice, the candidate is the threshold. Otherwise the key 2^20 further,
        // an eighth of the way from x to 2 x, becomes the upper bound if it does not suffice, else the lower
        // one.
        for (const uint32_t step : {1u, 1u << 20}) {
          if (step >= high - low) continue;
          const double next = fixed.real(sum_at(low + step));
          if (next < target) {
            high = low + step, beyond = next;
          } else {
            low += step;
          }
        }
      }
      const uint32_t largest = largest_collected(count, __uint_as_float(high));
      if (largest <= low) return found(low, sum_at(low));
      high = largest + 1;
    }
  }

  // Read the row into a histogram of the bounds. Return an interval within the bounds, around the bin with
  // the threshold. The bounds do not change. An interval with `low` = INFINITY collects nothing: the next
  // read only sums the elements >= `high`.
  template <typename T>
  __device__ __noinline__ static Interval narrow_by_bins(int n, const T* source) {
    const NucleusRow x(n);
    const Bounds bounds = nucleus_state().bounds;
    if (bounds.has_one_key()) return {INFINITY, __uint_as_float(bounds.low)};
    constexpr int kCount = kSampleBins / 2;
    Bins<kCount> split(bounds.low, bounds.high - 1);
    const Weights weights = Weights::of(bounds.high - 1, x.cluster_row.n);
    uint32_t* words = x.sample();
    __syncthreads();
    clear(words, kSampleBins);
#pragma unroll 1
    for (int at = 0; at < x.own_pairs; ++at) {
      Chunk pair[2];
      x.load<true>(pair, source, at);
      for (Chunk& chunk : pair) {
        chunk.for_each([&](float& value) {
          const uint32_t key = __float_as_uint(value);
          if (split.holds(key)) weights.add(words + 2 * split.bin_of(key), value);
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
    const auto need = static_cast<uint64_t>(ceil(fmax(nucleus_state().target - bounds.sum, 0.0) * weights.factor()));
    split.narrow(kCount - 1 - find_bin(values, need, kCount - 1).position);
    // Bin sums are rounded. After more than two misses, widen the interval by 4^(misses - 2) - 1 times the
    // bin's width on each side.
    const uint64_t more = (uint64_t{1} << 2 * min(max(bounds.misses - 2, 0), 16)) - 1;
    const uint64_t wider = more * (split.high + 1 - split.low);
    const auto low = static_cast<uint32_t>(split.low - min(wider, uint64_t{split.low - bounds.low}));
    const auto high = static_cast<uint32_t>(split.high + 1 + min(wider, uint64_t{bounds.high - 1 - split.high}));
    return {__uint_as_float(low), __uint_as_float(high)};
  }

  __device__ __noinline__ static Interval first_interval(int n) {
    const NucleusRow x(n);
    const NucleusState& k = nucleus_state();
    if (!(k.sample > 0)) return {__uint_as_float(1), INFINITY};
    return x.around(static_cast<uint32_t>(fmax(k.p, 0.0) * 0x1p30), kTargetElements, x.least(k.p, k.sample));
  }
  // Return a second interval. The first read gives the exact sum at one end of the first interval. The
  // distance from this sum to the target, as sample weight, is added to the sample weight at that end.
  __device__ __noinline__ static Interval second_interval(int n, Outcome outcome, double sum) {
    const NucleusRow x(n);
    const NucleusState& k = nucleus_state();
    const double scale = kSampleElements / (x.cluster_row.n * k.sample * 0x1p-30);
    const double need = (outcome == Outcome::kBelow ? k.from_low : k.from_high) + (k.target - sum) * scale;
    return x.around(static_cast<uint32_t>(fmin(fmax(need, 1.0), 0x1p30)),
                    outcome == Outcome::kTooMany ? kTargetElements / 3 : kTargetElements,
                    x.least(k.p, k.row_totals.real()));
  }

  // Return the result of a read. If it is kFound, the row's sums are sums of the elements >= the threshold.
  __device__ __noinline__ static Resolved resolve_of(int n, Interval interval) {
    NucleusRow x(n);
    if (interval.low == INFINITY) {
      const uint64_t kept = sum_of(n, 0, 0, nucleus_state().row_totals.fixed);
      const double sum = nucleus_state().row_totals.fixed.real(kept);
      return {sum >= nucleus_state().target ? Outcome::kFound : Outcome::kBelow, interval.high, kept, sum};
    }
    return x.resolve(interval, nucleus_state().target, nucleus_state().row_totals.fixed);
  }

  // Return the threshold, set `row_totals` to the total of kept elements, and leave their sums in shared memory.
  // Prefetch part of the next row to the L2 cache. With kReread, the caller rereads the row.
  template <bool kReread, typename T>
  __device__ __forceinline__ float filter(const T* source, const T* next, double p, Totals& row_totals) {
    Chunk even[2], odd[2];
    load<kReread>(even, source, 0), load<kReread>(odd, source, 1);
    Interval interval{INFINITY, 0};
    if (threadIdx.x == 0) nucleus_state().p = p;
    if (!(p >= 1)) {
      weigh_sample(even);
      interval = first_interval(cluster_row.n);
    }
    for (bool is_first = true;; is_first = false) {
      pass<kReread>(even, odd, source, interval);
      const double target_share = nucleus_state().p;
      if (is_first) {
        for (int pair = 0; pair < kPairsAhead; ++pair) prefetch(next, pair);
        Totals all = totals();
        all.valid = all.valid && target_share == target_share;
        if (!all.valid || target_share >= 1) {
          __syncthreads();  // another thread may change nucleus_state() next
          row_totals = all;
          return 0;
        }
        if (threadIdx.x == 0) {
          nucleus_state().row_totals = all, nucleus_state().target = fmax(target_share, 1e-30) * all.real();  // not 0
          nucleus_state().bounds = Bounds::all(all.fixed);
        }
        __syncthreads();
      }
      const Resolved result = resolve_of(cluster_row.n, interval);
      if (result.outcome == Outcome::kFound) {
        row_totals = nucleus_state().row_totals;
        row_totals.total = result.kept;
        return result.t;
      }
      if (threadIdx.x == 0) nucleus_state().bounds.update(interval, result);
      __syncthreads();
      const bool again = is_first && nucleus_state().sample > 0 && !nucleus_state().bounds.has_one_key();
      interval =
          again ? second_interval(cluster_row.n, result.outcome, result.sum) : narrow_by_bins(cluster_row.n, source);
      load<kReread>(even, source, 0), load<kReread>(odd, source, 1);
    }
  }
};

}  // namespace flashinfer::cuda
