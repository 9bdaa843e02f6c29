// Thresholds of a row. A key is an unsigned integer made of a number's bits: keys compare like their numbers.
// Top-k: the largest key such that at least k elements have it or a larger one. Top-p: the largest key such
// that the elements with it or a larger one sum to at least p of the row.
//
// A histogram finds the bin of the threshold. One pass gathers the keys of that bin, and every CTA searches
// them and finds the same threshold. If a bin has too many keys, the histograms of further passes narrow the
// interval.
//
// CTAs read each other's bins, so a barrier precedes each write to them.
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
  // Return the number that has this key. Key 0 gives -inf, so every element is at least that number.
  __device__ __forceinline__ static float real(uint32_t key) {
    return key == 0 ? -INFINITY : __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
  }
};

// Bins of the first histogram: the exponent and five bits of the mantissa, for 32 octaves up to the largest
// number.
struct Octaves {
  int base;

  __device__ static Octaves up_to(uint32_t max_key) { return {static_cast<int>(max_key >> 18) - (kBins - 1)}; }
  __device__ __forceinline__ uint32_t bin_of(uint32_t key) const {
    return static_cast<uint32_t>(max(static_cast<int>(key >> 18) - base, 0));
  }
  __device__ uint32_t low(uint32_t bin) const {
    const int bin_key = base + static_cast<int>(bin);
    return bin == 0 || bin_key < 0 ? 0u : static_cast<uint32_t>(bin_key) << 18;
  }
  __device__ uint32_t high(uint32_t bin) const {
    return (static_cast<uint32_t>(base + static_cast<int>(bin) + 1) << 18) - 1;
  }
};

__device__ __forceinline__ void clear(uint32_t* bins, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) bins[i] = 0;
  __syncthreads();
}

// Call f(x, inside) for all elements of the CTA's own chunks. Resident rows skip chunks whose maximum has a
// key below `least`. inside: the element is not after the row's end.
template <typename Key, bool kResident, typename F>
__device__ __forceinline__ void for_elements(const ClusterRow<kResident>& cluster_row, uint32_t least, const F& f) {
  const float* maxima = cluster_row.maxima();
  cluster_row.for_own_chunks([&](int c) {
    if (kResident && Key::key(maxima[c]) < least) return;
    Chunk chunk;
    cluster_row.load(chunk, c);
    const int left = cluster_row.remaining(c);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(chunk.at[j][i], part_start(j) + i < left);
    }
  });
}

// Sum the bins over all CTAs. A thread receives four sums, from the top bin down.
template <bool kResident>
__device__ __forceinline__ void merge_bins(const ClusterRow<kResident>& cluster_row, uint32_t (&words)[4]) {
  words[0] = words[1] = words[2] = words[3] = 0;
  if (threadIdx.x >= kBins / 4) return;
  const uint32_t* own = cluster_row.bins() + kBins - 4 - 4 * threadIdx.x;
#pragma unroll 4
  for (int r = 0; r < cluster_row.size; ++r) {
    const uint4 one = ptx::load4_of_rank(ptx::of_rank(own, r));
    words[0] += one.w, words[1] += one.z, words[2] += one.y, words[3] += one.x;
  }
}

template <bool kResident>
__device__ __noinline__ FoundBin find_bin_by_count(ClusterRow<kResident> cluster_row, uint64_t need) {
  uint32_t words[4];
  merge_bins(cluster_row, words);
  const uint64_t values[4] = {words[0], words[1], words[2], words[3]};
  return find_bin(values, need, kBins - 1);
}

template <bool kResident>
__device__ __noinline__ FoundBin find_bin_by_sum(ClusterRow<kResident> cluster_row, uint64_t need, Weights weights) {
  uint32_t words[4];
  merge_bins(cluster_row, words);
  const uint64_t values[2] = {weights.sum(words[1], words[0]), weights.sum(words[3], words[2])};
  return find_bin(values, need, kBins / 2 - 1);
}

// Narrow the interval by passes over the row until one key is left.
template <typename Key, bool kBySum, bool kResident>
__device__ __noinline__ ThresholdKey search_by_passes(ClusterRow<kResident> cluster_row, uint32_t low, uint32_t high,
                                                      uint64_t need, Weights weights) {
  constexpr int kCount = kBySum ? 512 : 1024;
  uint64_t value;
  do {
    cluster_row.sync_reads();
    Bins<kCount> bins(low, high);
    uint32_t* words = cluster_row.bins();
    clear(words, kBins);
    for_elements<Key>(cluster_row, low, [&](float x, bool exists) {
      const uint32_t key = Key::key(x);
      if (!exists || !bins.holds(key)) return;
      if constexpr (kBySum) weights.add(words + 2 * bins.bin_of(key), x);
      if constexpr (!kBySum) atomicAdd(words + bins.bin_of(key), 1u);
    });
    cluster_row.sync();
    const FoundBin found = kBySum ? find_bin_by_sum(cluster_row, need, weights) : find_bin_by_count(cluster_row, need);
    need = need > found.above ? need - found.above : 1;
    bins.narrow(kCount - 1 - found.position);
    low = bins.low, high = bins.high, value = found.value;
  } while (low < high);
  cluster_row.sync_reads();
  return {low, value};
}

// Return the elements of a chunk with a key in [low, high], as bits.
template <typename Key, bool kResident>
__device__ __forceinline__ uint32_t matches_in(const ClusterRow<kResident>& cluster_row, const Chunk& chunk, int c,
                                               uint32_t low, uint32_t high) {
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (Key::key(chunk.at[i / 4][i % 4]) - low <= high - low) found |= 1u << i;
  if (cluster_row.remaining(c) < kSumChunk) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (part_start(i / 4) + i % 4 >= cluster_row.remaining(c)) found &= ~(1u << i);
  }
  return found;
}

// Append the keys of the elements marked in `found`, if those of the whole warp fit.
template <typename Key>
__device__ __forceinline__ void append_matches(uint32_t* keys, const Chunk& one, const Chunk& other, uint32_t found) {
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

// Gather the keys in [low, high] into the memory of the bins. Return true if they fit. All CTAs must have
// finished with the bins before the call. No CTA may overwrite them until the next barrier.
template <typename Key, bool kResident>
__device__ __noinline__ bool gather(ClusterRow<kResident> cluster_row, uint32_t low, uint32_t high) {
  if (threadIdx.x == 0) scratch().counter = 0;
  cluster_row.begin_pass(cluster_row.size);
  const float* maxima = cluster_row.maxima();
  const auto reaches = [&](int c) { return !kResident || Key::key(maxima[c]) >= low; };
  cluster_row.for_chunk_pairs(
      [&](Chunk& chunk, int c) {
        if (reaches(c)) return cluster_row.load(chunk, c);
        chunk.for_each([](float& value) { value = 0; });
      },
      [&](const Chunk& one, const Chunk& other, int c, bool has_other) {
        const int next = c + cluster_row.warps();
        uint32_t found = reaches(c) ? matches_in<Key>(cluster_row, one, c, low, high) : 0;
        if (has_other && reaches(next)) found |= matches_in<Key>(cluster_row, other, next, low, high) << 16;
        append_matches<Key>(cluster_row.bins(), one, other, found);
      });
  __syncthreads();
  if (cluster_row.warp() == 0)
    cluster_row.broadcast_bits(&scratch().counts[cluster_row.rank], scratch().counter, lane_id() < 16);
  cluster_row.sync();  // the candidates of all CTAs are stored
  cluster_row.end_pass();
  bool fits = true;
  for (int r = 0; r < cluster_row.size; ++r) fits &= scratch().counts[r] <= kCandidates;
  return fits;
}

template <bool kResident, typename F>
__device__ __forceinline__ void for_candidates(const ClusterRow<kResident>& cluster_row, const F& f) {
  for (int r = 0; r < cluster_row.size; ++r) {
    const uint32_t keys = ptx::of_rank(cluster_row.bins(), r), count = scratch().counts[r];
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) f(ptx::load_of_rank(keys + 4 * i));
  }
}

// Find the bin at which the sum of value(bin), from the top bin down, reaches `need`.
template <typename F>
__device__ __forceinline__ FoundBin find_local_bin(const F& value, uint64_t need) {
  uint64_t values[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int bin = kLocalBins - 1 - (2 * static_cast<int>(threadIdx.x) + i);
    values[i] = bin >= 0 ? value(bin) : 0;
  }
  return find_bin(values, need, kLocalBins - 1);
}

// Narrow the interval by levels of bins over the gathered keys until one key is left. Every CTA computes the
// same.
template <bool kBySum, bool kResident>
__device__ __noinline__ ThresholdKey search_candidates(ClusterRow<kResident> cluster_row, uint32_t low, uint32_t high,
                                                       uint64_t need, Weights weights) {
  uint64_t value;
  do {
    Bins<kLocalBins> bins(low, high);
    uint32_t* words = cluster_row.local_bins();
    __syncthreads();
    clear(words, 2 * kLocalBins);
    for_candidates(cluster_row, [&](uint32_t key) {
      if (!bins.holds(key)) return;
      if constexpr (kBySum) weights.add(words + 2 * bins.bin_of(key), __uint_as_float(key));
      if constexpr (!kBySum) atomicAdd(words + 2 * bins.bin_of(key), 1u);
    });
    __syncthreads();
    const FoundBin found = find_local_bin(
        [&](int bin) -> uint64_t { return kBySum ? weights.sum(words[2 * bin], words[2 * bin + 1]) : words[2 * bin]; },
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
__device__ __forceinline__ Range maxima_keys(const ResidentRow& cluster_row) {
  const float* maxima = cluster_row.maxima();
  uint32_t min_key = 0xffffffffu, max_key = 0;
  for (int c = lane_id(); c < cluster_row.chunks; c += 32) {
    const uint32_t key = Key::key(maxima[c]);
    min_key = min(min_key, key), max_key = max(max_key, key);
  }
  return {__reduce_min_sync(kAllLanes, min_key), __reduce_max_sync(kAllLanes, max_key)};
}

// Return a lower bound of the k-th largest key: the k-th largest chunk maximum, rounded down to a bin.
template <typename Key>
__device__ __noinline__ uint32_t lower_bound_of_kth(ResidentRow cluster_row, uint32_t k) {
  const float* maxima = cluster_row.maxima();
  const Range range = maxima_keys<Key>(cluster_row);
  Bins<kLocalBins> bins(range.min_key, range.max_key);
  uint32_t* words = cluster_row.local_bins();
  __syncthreads();
  clear(words, kLocalBins);
  for (int c = threadIdx.x; c < cluster_row.chunks; c += blockDim.x)
    atomicAdd(words + bins.bin_of(Key::key(maxima[c])), 1u);
  __syncthreads();
  bins.narrow(kLocalBins - 1 - find_local_bin([&](int bin) -> uint64_t { return words[bin]; }, k).position);
  return bins.low;
}

// First histogram, by octaves: of counts, or of share_weight().
template <typename Key, bool kBySum, bool kResident>
__device__ __noinline__ FoundBin first_histogram(ClusterRow<kResident> cluster_row, Octaves octaves, uint32_t least,
                                                 Normalizer to_weight, uint64_t need) {
  uint32_t* words = cluster_row.bins();
  clear(words, kBins);
  for_elements<Key>(cluster_row, least, [&](float x, bool exists) {
    const uint32_t key = Key::key(x);
    if (kBySum ? key < least : !exists) return;
    uint32_t weight = 1;
    if constexpr (kBySum) weight = share_weight(x, to_weight);
    atomicAdd(words + octaves.bin_of(key), weight);
  });
  cluster_row.sync();
  const FoundBin found = find_bin_by_count(cluster_row, need);
  cluster_row.sync_reads();
  return found;
}

// Return the key of the k-th largest element, 1 <= k < n, or 0 if fewer than k keys exceed 0.
template <typename Key, bool kResident>
__device__ __forceinline__ uint32_t top_k_key(ClusterRow<kResident>& cluster_row, uint64_t k) {
  const Weights none{};
  if constexpr (kResident) {
    uint32_t low, high = maxima_keys<Key>(cluster_row).max_key;
    uint64_t need = k;
    if (2 * k <= cluster_row.chunks) {
      low = lower_bound_of_kth<Key>(cluster_row, static_cast<uint32_t>(k));
    } else {
      const Octaves octaves = Octaves::up_to(high);
      const FoundBin found = first_histogram<Key, false>(cluster_row, octaves, 0, {}, k);
      const uint32_t bin = kBins - 1 - found.position;
      low = octaves.low(bin), high = min(octaves.high(bin), high), need = k > found.above ? k - found.above : 1;
    }
    const bool fits = gather<Key>(cluster_row, low, high);
    ++cluster_row.pass;
    const ThresholdKey edge = fits ? search_candidates<false>(cluster_row, low, high, need, none)
                                   : search_by_passes<Key, false>(cluster_row, low, high, need, none);
    cluster_row.sync_reads();
    return edge.key;
  } else {
    return search_by_passes<Key, false>(cluster_row, 0, 0xffffffffu, k, none).key;
  }
}

// Return the largest t at which the elements >= t sum to at least p times the total of `row`.
template <bool kResident>
__device__ __forceinline__ float top_p_threshold(ClusterRow<kResident>& cluster_row, double p, const Totals& row_totals,
                                                 float largest) {
  if (!(p > 0)) return largest;
  const uint32_t max_key = __float_as_uint(largest);
  const Octaves octaves = Octaves::up_to(max_key);
  const double mass = row_totals.real(), target = p * mass;
  // The elements below `least` sum to less than 1 - p of the row, so the threshold is not among them.
  const uint32_t least = __float_as_uint(static_cast<float>((1 - p) * mass / cluster_row.n) * 0.999f);
  const uint64_t needed_weight = static_cast<uint64_t>(p * 0x1p30);
  const FoundBin found =
      first_histogram<Unsigned, true>(cluster_row, octaves, least, Normalizer::of(mass * 0x1p-30), needed_weight);
  const uint32_t bin = kBins - 1 - found.position, low = octaves.low(bin), high = min(octaves.high(bin), max_key);
  const Weights weights = Weights::of(high, cluster_row.n);
  const auto kept = [&](uint32_t key) {
    cluster_row.sum_kept(__uint_as_float(key));
    return cluster_row.totals(row_totals.fixed).real();
  };
  const auto resolve = [&](uint64_t need) {
    const bool fits = gather<Unsigned>(cluster_row, low, high);
    ++cluster_row.pass;
    const ThresholdKey edge = fits ? search_candidates<true>(cluster_row, low, high, need, weights)
                                   : search_by_passes<Unsigned, true>(cluster_row, low, high, need, weights);
    cluster_row.sync_reads();
    return edge;
  };
  return exact_threshold(weights, needed_weight, found.above, mass, high, max_key, target, row_totals.fixed, resolve,
                         kept);
}

}  // namespace flashinfer::cuda
