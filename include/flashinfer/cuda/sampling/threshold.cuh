// Thresholds: the largest key such that the elements with this key or a larger one suffice, by count (top-k) or by
// sum (top-p).
//
// A histogram finds the bin of the threshold. One pass gathers the keys of that bin. Every CTA then searches them
// and finds the same threshold. If a bin has too many keys, histograms of further passes narrow the interval.
//
// CTAs read each other's bins, so a barrier precedes each rewrite.
#pragma once

#include <flashinfer/cuda/sampling/bins.cuh>

namespace flashinfer::cuda {

// Keys of numbers >= 0.
struct Unsigned {
  __device__ __forceinline__ static uint32_t key(float x) { return __float_as_uint(x); }
};

// Keys of all numbers in their order; NaN has key 0.
struct Signed {
  __device__ __forceinline__ static uint32_t key(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0u : bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  }
  // Return the number of a key. Key 0 gives -inf, which every element reaches.
  __device__ __forceinline__ static float real(uint32_t key) {
    return key == 0 ? -INFINITY : __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
  }
};

// Bins of the first histogram: exponent and five bits of the mantissa, in the 32 octaves below the largest
// number.
struct Octaves {
  int base;

  __device__ static Octaves up_to(uint32_t max_key) { return {static_cast<int>(max_key >> 18) - (kBins - 1)}; }
  __device__ __forceinline__ uint32_t of(uint32_t key) const {
    return static_cast<uint32_t>(max(static_cast<int>(key >> 18) - base, 0));
  }
  __device__ uint32_t low(uint32_t bin) const {
    const int octave = base + static_cast<int>(bin);
    return bin == 0 || octave < 0 ? 0u : static_cast<uint32_t>(octave) << 18;
  }
  __device__ uint32_t high(uint32_t bin) const {
    return (static_cast<uint32_t>(base + static_cast<int>(bin) + 1) << 18) - 1;
  }
};

__device__ __forceinline__ void clear(uint32_t* bins, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) bins[i] = 0;
  __syncthreads();
}

// Call f(x, inside) for the elements of chunks with a key of at least `least`.
template <typename Key, bool kResident, typename F>
__device__ __forceinline__ void each_element(const Engine<kResident>& engine, uint32_t least, const F& f) {
  const float* maxima = engine.maxima();
  engine.each_own([&](int c) {
    if (kResident && Key::key(maxima[c]) < least) return;
    Chunk chunk;
    engine.load(chunk, c);
    const int left = engine.left(c);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(chunk.at[j][i], part_start(j) + i < left);
    }
  });
}

// Sum the bins of all CTAs: the thread's four words, from the top down.
template <bool kResident>
__device__ __forceinline__ void merged(const Engine<kResident>& engine, uint32_t (&words)[4]) {
  words[0] = words[1] = words[2] = words[3] = 0;
  if (threadIdx.x >= kBins / 4) return;
  const uint32_t* own = engine.bins() + kBins - 4 - 4 * threadIdx.x;
#pragma unroll 4
  for (int r = 0; r < engine.size; ++r) {
    const uint4 one = ptx::load4_of_rank(ptx::of_rank(own, r));
    words[0] += one.w, words[1] += one.z, words[2] += one.y, words[3] += one.x;
  }
}

template <bool kResident>
__device__ __noinline__ Found find_count(Engine<kResident> engine, uint64_t need) {
  uint32_t words[4];
  merged(engine, words);
  const uint64_t values[4] = {words[0], words[1], words[2], words[3]};
  return find(values, need, kBins - 1);
}

template <bool kResident>
__device__ __noinline__ Found find_mass(Engine<kResident> engine, uint64_t need, Weights weights) {
  uint32_t words[4];
  merged(engine, words);
  const uint64_t values[2] = {weights.sum(words[1], words[0]), weights.sum(words[3], words[2])};
  return find(values, need, kBins / 2 - 1);
}

// Narrow the interval by passes over the row until one key is left.
template <typename Key, bool kMass, bool kResident>
__device__ __noinline__ Edge by_passes(Engine<kResident> engine, uint32_t low, uint32_t high, uint64_t need,
                                       Weights weights) {
  constexpr int kCount = kMass ? 512 : 1024;
  uint64_t value;
  do {
    engine.sync_reads();
    Bins<kCount> bins(low, high);
    uint32_t* words = engine.bins();
    clear(words, kBins);
    each_element<Key>(engine, low, [&](float x, bool exists) {
      const uint32_t key = Key::key(x);
      if (!exists || !bins.holds(key)) return;
      if constexpr (kMass) weights.add(words + 2 * bins.of(key), x);
      if constexpr (!kMass) atomicAdd(words + bins.of(key), 1u);
    });
    engine.sync();
    const Found found = kMass ? find_mass(engine, need, weights) : find_count(engine, need);
    need = need > found.above ? need - found.above : 1;
    bins.narrow(kCount - 1 - found.position);
    low = bins.low, high = bins.high, value = found.value;
  } while (low < high);
  engine.sync_reads();
  return {low, value};
}

// Return the elements of a chunk with a key in [low, high], as bits.
template <typename Key, bool kResident>
__device__ __forceinline__ uint32_t found_in(const Engine<kResident>& engine, const Chunk& chunk, int c, uint32_t low,
                                             uint32_t high) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (Key::key(chunk.at[i / 4][i % 4]) - low <= high - low) found |= 1u << i;
  if (engine.left(c) < kSumChunk) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (part_start(i / 4) + i % 4 >= engine.left(c)) found &= ~(1u << i);
  }
  return found;
}

// Append the keys of the elements marked in `found`, if all of the warp's fit.
template <typename Key>
__device__ __forceinline__ void put_found(uint32_t* keys, const Chunk& one, const Chunk& other, uint32_t found) {
  if (!__any_sync(kAllLanes, found)) return;
  const int lane = lane_id();
  const uint32_t end = ptx::warp_inclusive_sum(__popc(found));
  uint32_t base = 0;
  if (lane == 31) base = atomicAdd(&scratch().counter, end);
  base = __shfl_sync(kAllLanes, base, 31);
  if (base + __shfl_sync(kAllLanes, end, 31) > kCandidates) return;
  keys += base + end - __popc(found);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (found >> i & 1) *keys++ = Key::key(one.at[i / 4][i % 4]);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (found >> (16 + i) & 1) *keys++ = Key::key(other.at[i / 4][i % 4]);
}

// Gather the keys in [low, high] into the memory of the bins and return true if they fit. No CTA may use the
// bins at the start. All CTAs read them until the next barrier.
template <typename Key, bool kResident>
__device__ __noinline__ bool gather(Engine<kResident> engine, uint32_t low, uint32_t high) {
  if (threadIdx.x == 0) scratch().counter = 0;
  engine.begin_pass(engine.size);
  const float* maxima = engine.maxima();
  const auto reaches = [&](int c) { return !kResident || Key::key(maxima[c]) >= low; };
  engine.each_pair(
      [&](Chunk& chunk, int c) {
        if (reaches(c)) return engine.load(chunk, c);
        chunk.each([](float& value) { value = 0; });
      },
      [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
        const int next = c + engine.warps();
        uint32_t found = reaches(c) ? found_in<Key>(engine, one, c, low, high) : 0;
        if (has_other && reaches(next)) found |= found_in<Key>(engine, other, next, low, high) << 16;
        put_found<Key>(engine.bins(), one, other, found);
      });
  __syncthreads();
  if (engine.warp() == 0) engine.broadcast_bits(&scratch().counts[engine.rank], scratch().counter, lane_id() < 16);
  engine.sync();  // the candidates of all CTAs are stored
  engine.end_pass();
  bool fits = true;
  for (int r = 0; r < engine.size; ++r) fits &= scratch().counts[r] <= kCandidates;
  return fits;
}

template <bool kResident, typename F>
__device__ __forceinline__ void each_candidate(const Engine<kResident>& engine, const F& f) {
  for (int r = 0; r < engine.size; ++r) {
    const uint32_t keys = ptx::of_rank(engine.bins(), r), count = scratch().counts[r];
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) f(ptx::load_of_rank(keys + 4 * i));
  }
}

// Find the bin by value(bin), from the top bin down.
template <typename F>
__device__ __forceinline__ Found find_local(const F& value, uint64_t need) {
  uint64_t values[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int bin = kLocalBins - 1 - (2 * static_cast<int>(threadIdx.x) + i);
    values[i] = bin >= 0 ? value(bin) : 0;
  }
  return find(values, need, kLocalBins - 1);
}

// Narrow the interval by levels of bins over the gathered keys until one key is left. Every CTA computes the same.
template <bool kMass, bool kResident>
__device__ __noinline__ Edge by_candidates(Engine<kResident> engine, uint32_t low, uint32_t high, uint64_t need,
                                           Weights weights) {
  uint64_t value;
  do {
    Bins<kLocalBins> bins(low, high);
    uint32_t* words = engine.local_bins();
    __syncthreads();
    clear(words, 2 * kLocalBins);
    each_candidate(engine, [&](uint32_t key) {
      if (!bins.holds(key)) return;
      if constexpr (kMass) weights.add(words + 2 * bins.of(key), __uint_as_float(key));
      if constexpr (!kMass) atomicAdd(words + 2 * bins.of(key), 1u);
    });
    __syncthreads();
    const Found found = find_local(
        [&](int bin) -> uint64_t { return kMass ? weights.sum(words[2 * bin], words[2 * bin + 1]) : words[2 * bin]; },
        need);
    need = need > found.above ? need - found.above : 1;
    bins.narrow(kLocalBins - 1 - found.position);
    low = bins.low, high = bins.high, value = found.value;
  } while (low < high);
  return {low, value};
}

// Smallest and largest key of the chunk maxima.
struct Range {
  uint32_t min_key, max_key;
};

template <typename Key>
__device__ __forceinline__ Range maxima_keys(const ResidentRow& engine) {
  const float* maxima = engine.maxima();
  uint32_t min_key = 0xffffffffu, max_key = 0;
  for (int c = lane_id(); c < engine.chunks; c += 32) {
    const uint32_t key = Key::key(maxima[c]);
    min_key = min(min_key, key), max_key = max(max_key, key);
  }
  return {__reduce_min_sync(kAllLanes, min_key), __reduce_max_sync(kAllLanes, max_key)};
}

// Return a key that at least k elements reach: the k-th largest chunk maximum, rounded down to a bin.
template <typename Key>
__device__ __noinline__ uint32_t reached_by(ResidentRow engine, uint32_t k) {
  const float* maxima = engine.maxima();
  const Range range = maxima_keys<Key>(engine);
  Bins<kLocalBins> bins(range.min_key, range.max_key);
  uint32_t* words = engine.local_bins();
  __syncthreads();
  clear(words, kLocalBins);
  for (int c = threadIdx.x; c < engine.chunks; c += blockDim.x) atomicAdd(words + bins.of(Key::key(maxima[c])), 1u);
  __syncthreads();
  bins.narrow(kLocalBins - 1 - find_local([&](int bin) -> uint64_t { return words[bin]; }, k).position);
  return bins.low;
}

// First histogram, by octaves: counts, or the rounded share of each element in a sum of 2^30.
template <typename Key, bool kMass, bool kResident>
__device__ __noinline__ Found first_histogram(Engine<kResident> engine, Octaves octaves, uint32_t least,
                                              Normalizer share, uint64_t need) {
  uint32_t* words = engine.bins();
  clear(words, kBins);
  each_element<Key>(engine, least, [&](float x, bool exists) {
    const uint32_t key = Key::key(x);
    if (kMass ? key < least : !exists) return;
    uint32_t weight = 1;
    if constexpr (kMass) {
      // The addition rounds, unless the integer takes more than 23 bits.
      const float raised = x * share.up, sum = fmaf(raised, share.inverse, 0x1p23f);
      weight = sum < 0x1p24f ? __float_as_uint(sum) & 0x7fffffu : __float2uint_rn(raised * share.inverse);
    }
    atomicAdd(words + octaves.of(key), weight);
  });
  engine.sync();
  const Found found = find_count(engine, need);
  engine.sync_reads();
  return found;
}

// Return the key of the k-th largest element, 1 <= k < n, or 0 if fewer than k keys exceed 0.
template <typename Key, bool kResident>
__device__ __forceinline__ uint32_t top_k_key(Engine<kResident>& engine, uint64_t k) {
  const Weights none{};
  if constexpr (kResident) {
    uint32_t low, high = maxima_keys<Key>(engine).max_key;
    uint64_t need = k;
    if (2 * k <= engine.chunks) {
      low = reached_by<Key>(engine, static_cast<uint32_t>(k));
    } else {
      const Octaves octaves = Octaves::up_to(high);
      const Found found = first_histogram<Key, false>(engine, octaves, 0, {}, k);
      const uint32_t bin = kBins - 1 - found.position;
      low = octaves.low(bin), high = min(octaves.high(bin), high), need = k > found.above ? k - found.above : 1;
    }
    const bool fits = gather<Key>(engine, low, high);
    ++engine.pass;
    const Edge edge = fits ? by_candidates<false>(engine, low, high, need, none)
                           : by_passes<Key, false>(engine, low, high, need, none);
    engine.sync_reads();
    return edge.key;
  } else {
    return by_passes<Key, false>(engine, 0, 0xffffffffu, k, none).key;
  }
}

// Return the largest v with sum(x >= v) >= p * S, with the total S of `row`.
template <bool kResident>
__device__ __forceinline__ float top_p_threshold(Engine<kResident>& engine, double p, const Totals& row,
                                                 float largest) {
  if (!(p > 0)) return largest;
  const uint32_t max_key = __float_as_uint(largest);
  const Octaves octaves = Octaves::up_to(max_key);
  const double mass = row.real(), target = p * mass;
  // All smaller elements together hold less than the share 1 - p.
  const uint32_t least = __float_as_uint(static_cast<float>((1 - p) * mass / engine.n) * 0.999f);
  const uint64_t share = static_cast<uint64_t>(p * 0x1p30);
  const Found found = first_histogram<Unsigned, true>(engine, octaves, least, Normalizer::of(mass * 0x1p-30), share);
  const uint32_t bin = kBins - 1 - found.position, low = octaves.low(bin), high = min(octaves.high(bin), max_key);
  const Weights weights = Weights::of(high, engine.n);
  const auto kept = [&](uint32_t key) {
    engine.sum_kept(__uint_as_float(key));
    return engine.totals(row.fixed).real();
  };
  const auto resolve = [&](uint64_t need) {
    const bool fits = gather<Unsigned>(engine, low, high);
    ++engine.pass;
    const Edge edge = fits ? by_candidates<true>(engine, low, high, need, weights)
                           : by_passes<Unsigned, true>(engine, low, high, need, weights);
    engine.sync_reads();
    return edge;
  };
  return exact_threshold(weights, share, found.above, mass, high, max_key, target, row.fixed, resolve, kept);
}

}  // namespace flashinfer::cuda
