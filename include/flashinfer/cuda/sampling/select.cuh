// Thresholds: the largest key for which the elements at or above it are enough, by count (top-k) or by sum (top-p).
//
// A histogram names the bin of the threshold, one pass gathers the elements of that bin, and what was gathered is
// parted further in every block by itself. Where a bin holds more than there is room for, the passes go on over rows.
//
// Bins are read by other blocks: before they are written again, a barrier lies in between.
#pragma once

#include <flashinfer/cuda/sampling/find.cuh>

namespace flashinfer::cuda {

// Keys of numbers >= 0.
struct Unsigned {
  __device__ __forceinline__ static uint32_t key(float x) { return __float_as_uint(x); }
};

// Keys of all numbers in their order; of NaN 0.
struct Signed {
  __device__ __forceinline__ static uint32_t key(float x) {
    const uint32_t bits = __float_as_uint(x);
    return x != x ? 0u : bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  }
};

// Exponent and five bits of the mantissa, of the 32 octaves up to the largest number: bins for the first look.
struct Octaves {
  int base;

  __device__ static Octaves up_to(uint32_t most) { return {static_cast<int>(most >> 18) - (kBins - 1)}; }
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

// f(x) of the elements of chunks that have a key of at least `least`.
template <typename Key, bool kResident, typename F>
__device__ __forceinline__ void each_element(const Engine<kResident>& e, uint32_t least, const F& f) {
  const float* maxima = e.maxima();
  e.each_own([&](int c) {
    if (kResident && Key::key(maxima[c]) < least) return;
    Chunk chunk;
    e.load(chunk, c);
    const int left = e.left(c);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(chunk.at[j][i], part_start(j) + i < left);
    }
  });
}

// Of all blocks' bins: the thread's four words from the top down.
template <bool kResident>
__device__ __forceinline__ void merged(const Engine<kResident>& e, uint32_t (&words)[4]) {
  words[0] = words[1] = words[2] = words[3] = 0;
  if (threadIdx.x >= kBins / 4) return;
  const uint32_t* own = e.bins() + kBins - 4 - 4 * threadIdx.x;
#pragma unroll 4
  for (int r = 0; r < e.size; ++r) {
    const uint4 one = ptx::load4_of_rank(ptx::of_rank(own, r));
    words[0] += one.w, words[1] += one.z, words[2] += one.y, words[3] += one.x;
  }
}

template <bool kResident>
__device__ __noinline__ Found find_count(Engine<kResident> e, uint64_t need) {
  uint32_t words[4];
  merged(e, words);
  const uint64_t values[4] = {words[0], words[1], words[2], words[3]};
  return find(values, need, kBins - 1);
}

template <bool kResident>
__device__ __noinline__ Found find_mass(Engine<kResident> e, uint64_t need, Weights weights) {
  uint32_t words[4];
  merged(e, words);
  const uint64_t values[2] = {weights.sum(words[1], words[0]), weights.sum(words[3], words[2])};
  return find(values, need, kBins / 2 - 1);
}

// Passes over the row until one key is left.
template <typename Key, bool kMass, bool kResident>
__device__ __noinline__ uint32_t by_passes(Engine<kResident> e, uint32_t low, uint32_t high, uint64_t need,
                                           Weights weights) {
  constexpr int kCount = kMass ? 512 : 1024;
  while (low < high) {
    ptx::cluster_sync_reads();
    Bins<kCount> bins(low, high);
    uint32_t* words = e.bins();
    clear(words, kBins);
    each_element<Key>(e, low, [&](float x, bool there) {
      const uint32_t key = Key::key(x);
      if (!there || !bins.holds(key)) return;
      if constexpr (kMass) weights.add(words + 2 * bins.of(key), x);
      if constexpr (!kMass) atomicAdd(words + bins.of(key), 1u);
    });
    ptx::cluster_sync();
    const Found found = kMass ? find_mass(e, need, weights) : find_count(e, need);
    need = need > found.above ? need - found.above : 1;
    bins.narrow(kCount - 1 - found.position);
    low = bins.low, high = bins.high;
  }
  ptx::cluster_sync_reads();
  return low;
}

__device__ __forceinline__ uint32_t* take_room(uint32_t* bins, uint32_t count, uint32_t& at) {
  const int lane = lane_id();
  uint32_t end = count;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const uint32_t other = __shfl_up_sync(kWarp, end, apart);
    if (lane >= apart) end += other;
  }
  uint32_t base = 0;
  if (lane == 31) base = atomicAdd(&scratch().counter, end);
  at = __shfl_sync(kWarp, base, 31) + end - count;
  return bins;
}

// Elements of [low, high] into the memory of the bins; with kMass also sums of what lies above, to the engine's sums.
// The bins are nobody's when this begins, and read by all until the next barrier after it. Whether there was room.
template <typename Key, bool kMass, bool kResident>
__device__ __noinline__ bool gather(Engine<kResident> e, uint32_t low, uint32_t high) {
  if (threadIdx.x == 0) scratch().counter = 0;
  e.begin(kMass ? e.chunks + e.size : e.size);
  const float* maxima = e.maxima();
  float* sums = e.sums();
  uint32_t* bins = e.bins();
  e.each_own([&](int c) {
    float sum = 0;
    if (!kResident || Key::key(maxima[c]) >= low) {
      Chunk chunk;
      e.load(chunk, c);
      const int left = e.left(c);
      uint32_t found = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t key = Key::key(chunk.at[j][i]);
          if (key - low <= high - low && part_start(j) + i < left) found |= 1u << (4 * j + i);
        }
      }
      if (__any_sync(kWarp, found)) {
        uint32_t at;
        take_room(bins, __popc(found), at);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (found >> (4 * j + i) & 1) {
              if (at < kCandidates) bins[at] = Key::key(chunk.at[j][i]);
              ++at;
            }
          }
        }
      }
      if constexpr (kMass) {
        if (!kResident || Key::key(maxima[c]) > high)
          sum = chunk_sum(chunk, [&](float value) { return Key::key(value) > high ? value : 0.0f; });
      }
    }
    if constexpr (kMass) e.tell_all(sums + c, sum);
  });
  __syncthreads();
  if (e.warp() == 0) e.tell_all_bits(&scratch().counts[e.rank], scratch().counter, lane_id() < 16);
  ptx::cluster_sync();  // the candidates of all blocks are there
  e.meet();
  bool room = true;
  for (int r = 0; r < e.size; ++r) room &= scratch().counts[r] <= kCandidates;
  return room;
}

template <bool kResident, typename F>
__device__ __forceinline__ void each_candidate(const Engine<kResident>& e, const F& f) {
  for (int r = 0; r < e.size; ++r) {
    const uint32_t keys = ptx::of_rank(e.bins(), r), count = scratch().counts[r];
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) f(ptx::load_of_rank(keys + 4 * i));
  }
}

// Levels of bins over what was gathered, in each block for itself, until one key is left.
template <bool kMass, bool kResident>
__device__ __noinline__ uint32_t by_candidates(Engine<kResident> e, uint32_t low, uint32_t high, uint64_t need,
                                               Weights weights) {
  while (low < high) {
    Bins<kLocalBins> bins(low, high);
    uint32_t* words = e.local_bins();
    __syncthreads();
    clear(words, 2 * kLocalBins);
    each_candidate(e, [&](uint32_t key) {
      if (!bins.holds(key)) return;
      if constexpr (kMass) weights.add(words + 2 * bins.of(key), __uint_as_float(key));
      if constexpr (!kMass) atomicAdd(words + 2 * bins.of(key), 1u);
    });
    __syncthreads();
    uint64_t value[1] = {0};
    if (threadIdx.x < kLocalBins) {
      const uint32_t* pair = words + 2 * (kLocalBins - 1 - threadIdx.x);
      value[0] = kMass ? weights.sum(pair[0], pair[1]) : pair[0];
    }
    const Found found = find(value, need, kLocalBins - 1);
    need = need > found.above ? need - found.above : 1;
    bins.narrow(kLocalBins - 1 - found.position);
    low = bins.low, high = bins.high;
  }
  return low;
}

// A key that at least k elements reach: the k-th largest of the chunks' maxima, rounded down to a bin. `most` becomes
// the largest key.
template <typename Key>
__device__ __noinline__ uint32_t reached_by(Engine<true> e, uint32_t k) {
  const float* maxima = e.maxima();
  uint32_t least = 0xffffffffu, most = 0;
  for (int c = lane_id(); c < e.chunks; c += 32) {
    const uint32_t key = Key::key(maxima[c]);
    least = min(least, key), most = max(most, key);
  }
  least = __reduce_min_sync(kWarp, least), most = __reduce_max_sync(kWarp, most);
  Bins<kLocalBins> bins(least, most);
  uint32_t* words = e.local_bins();
  __syncthreads();
  clear(words, kLocalBins);
  for (int c = threadIdx.x; c < e.chunks; c += blockDim.x) atomicAdd(words + bins.of(Key::key(maxima[c])), 1u);
  __syncthreads();
  const uint64_t value[1] = {threadIdx.x < kLocalBins ? words[kLocalBins - 1 - threadIdx.x] : 0u};
  bins.narrow(kLocalBins - 1 - find(value, k, kLocalBins - 1).position);
  return bins.low;
}

// The key of the k-th largest element, 1 <= k < n; 0 where fewer have a key above 0. Keys are at most `most`.
template <typename Key, bool kResident>
__device__ __forceinline__ uint32_t top_k_key(Engine<kResident>& e, uint64_t k, uint32_t most) {
  const Weights none{};
  if constexpr (kResident) {
    if (2 * k <= e.chunks) {
      const uint32_t low = reached_by<Key>(e, static_cast<uint32_t>(k));
      const bool room = gather<Key, false>(e, low, most);
      ++e.pass;
      if (room) return by_candidates<false>(e, low, most, k, none);
      return by_passes<Key, false>(e, low, most, k, none);
    }
  }
  return by_passes<Key, false>(e, 0, most, k, none);
}

// Counts of the row in octaves' bins, or the rounded share of each element in a sum of 2^30.
template <bool kMass, bool kResident>
__device__ __noinline__ Found first_look(Engine<kResident> e, Octaves octaves, uint32_t least, Normalizer share,
                                         uint64_t need) {
  uint32_t* words = e.bins();
  clear(words, kBins);
  each_element<Unsigned>(e, least, [&](float x, bool there) {
    const uint32_t key = __float_as_uint(x);
    if (kMass ? key < least : !there) return;
    atomicAdd(words + octaves.of(key), kMass ? __float2uint_rn(share(x)) : 1u);
  });
  ptx::cluster_sync();
  const Found found = find_count(e, need);
  ptx::cluster_sync_reads();
  return found;
}

// The k-th largest of x >= 0, 1 <= k < n.
template <bool kResident>
__device__ __forceinline__ float top_k_threshold(Engine<kResident>& e, uint64_t k, float largest) {
  const uint32_t most = __float_as_uint(largest);
  if (kResident && 2 * k <= e.chunks) {
    const uint32_t key = top_k_key<Unsigned>(e, k, most);
    ptx::cluster_sync_reads();
    return __uint_as_float(key);
  }
  const Octaves octaves = Octaves::up_to(most);
  const Found found = first_look<false>(e, octaves, 0, {}, k);
  const uint32_t bin = kBins - 1 - found.position, low = octaves.low(bin), high = min(octaves.high(bin), most);
  const Weights none{};
  const bool room = gather<Unsigned, false>(e, low, high);
  ++e.pass;
  const uint64_t need = k - found.above;
  const uint32_t key =
      room ? by_candidates<false>(e, low, high, need, none) : by_passes<Unsigned, false>(e, low, high, need, none);
  ptx::cluster_sync_reads();
  return __uint_as_float(key);
}

// The sum of the candidates as weights have it.
template <bool kResident>
__device__ __noinline__ uint64_t candidates_weight(Engine<kResident> e, Weights weights) {
  uint64_t own = 0;
  each_candidate(e, [&](uint32_t key) { own += weights(__uint_as_float(key)); });
  own = warp_sum(own);
  __syncthreads();
  if (lane_id() == 0) scratch().warp_totals[e.warp()] = own;
  __syncthreads();
  uint64_t all = 0;
  for (int w = 0; w < e.warps(); ++w) all += scratch().warp_totals[w];
  return all;
}

// The largest v with sum(x >= v) >= p * S, where S is what `row` says.
template <bool kResident>
__device__ __forceinline__ float top_p_threshold(Engine<kResident>& e, double p, const Totals& row, float largest) {
  if (!(p > 0)) return largest;
  const uint32_t most = __float_as_uint(largest);
  const Octaves octaves = Octaves::up_to(most);
  const double mass = row.real(), wanted = p * mass;
  // Smaller elements have less than what may be missing, all together.
  const uint32_t least = __float_as_uint(static_cast<float>((1 - p) * mass / e.n) * 0.999f);
  const Found found =
      first_look<true>(e, octaves, least, Normalizer::of(mass * 0x1p-30), static_cast<uint64_t>(p * 0x1p30));
  // Sums of bins are rounded: the exact sum above the bin tells whether it is the right one.
  uint32_t bin = kBins - 1 - found.position;
  for (bool went_down = false;;) {
    const uint32_t low = octaves.low(bin), high = min(octaves.high(bin), most);
    e.sums_at ^= 1;
    const bool room = gather<Unsigned, true>(e, low, high);
    ++e.pass;
    const double missing = wanted - e.totals(row.fixed).real();
    const Weights weights = Weights::of(high, e.n);
    const uint64_t need = missing > 0 ? static_cast<uint64_t>(ceil(missing * weights.real())) : 1;
    uint32_t key = 0;
    bool again = false;
    if (!(missing > 0) && high < most) {
      again = !went_down, key = high + 1, ++bin;
    } else if (room && low > least && candidates_weight(e, weights) < need) {
      again = went_down = true, --bin;
    } else {
      key = room ? by_candidates<true>(e, low, high, need, weights)
                 : by_passes<Unsigned, true>(e, low, high, need, weights);
    }
    ptx::cluster_sync_reads();
    if (!again) return __uint_as_float(key);
  }
}

}  // namespace flashinfer::cuda
