// Thresholds of rows in the smem of a cluster, by the algorithm of threshold.cuh.
//
// The memory of the bins has these areas: two histograms used alternately, the keys that a CTA finds, and a
// copy of the keys of all CTAs. All CTAs synchronise once between a read of an area and its
// next write.
#pragma once

#include <flashinfer/cuda/sampling/cluster_smem.cuh>
#include <flashinfer/cuda/sampling/threshold.cuh>

namespace flashinfer::cuda {

// Numbers of keys that the CTAs of a cluster have gathered. `count` of lane r is that of CTA r.
struct Gathered {
  bool fits;
  uint32_t total, count;
};

struct ClusterSmemSearch : ClusterSmem {
  // Sum the bins over all CTAs. A thread receives kBinsPerThread sums, from the top bin down.
  static constexpr int kBinsPerThread = kBins / 256;
  __device__ __forceinline__ void merge_bins(uint32_t (&words)[kBinsPerThread]) const {
    cluster_row.sync();
#pragma unroll
    for (uint32_t& word : words) word = 0;
    if (threadIdx.x >= kBins / kBinsPerThread) return;
    const uint32_t* own = bins() + kBins - 4 - 4 * threadIdx.x;
#pragma unroll 4
    for (int r = 0; r < cluster_row.size; ++r) {
      const uint4 part = ptx::load4_of_rank(ptx::of_rank(own, r));
      words[0] += part.w, words[1] += part.z, words[2] += part.y, words[3] += part.x;
    }
  }
  template <bool kBySum>
  __device__ __forceinline__ FoundBin find_in(uint64_t need, Weights weights) const {
    uint32_t words[kBinsPerThread];
    merge_bins(words);
    if constexpr (kBySum) {
      const uint64_t values[2] = {weights.sum(words[1], words[0]), weights.sum(words[3], words[2])};
      return find_bin(values, need, kBins / 2 - 1);
    } else {
      const uint64_t values[4] = {words[0], words[1], words[2], words[3]};
      return find_bin(values, need, kBins - 1);
    }
  }

  template <typename Key>
  __device__ __forceinline__ Gathered gather(uint32_t low, uint32_t high) {
    if (threadIdx.x == 0) scratch().counter = 0;
    __syncthreads();
    for_chunks([&](const Chunk& x, int) {
      uint32_t found = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (Key::key(x.at[i / 4][i % 4]) - low <= high - low) found |= 1u << i;
      if (!__any_sync(kAllLanes, found)) return;
      const uint32_t end = ptx::warp_inclusive_sum(__popc(found));
      uint32_t base = 0;
      if (lane_id() == 31) base = atomicAdd(&scratch().counter, end);
      base = __shfl_sync(kAllLanes, base, 31);
      if (base + __shfl_sync(kAllLanes, end, 31) > kKeysPerCta) return;
      uint32_t* to = keys() + base + end - __popc(found);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (found >> i & 1) *to++ = Key::key(x.at[i / 4][i % 4]);
    });
    cluster_row.sync();
    const int lane = lane_id();
    const uint32_t count = lane < cluster_row.size ? ptx::load_of_rank(ptx::of_rank(&scratch().counter, lane)) : 0;
    return {!__any_sync(kAllLanes, count > kKeysPerCta), __reduce_add_sync(kAllLanes, count), count};
  }

  // Call f(key, index) for all gathered keys. The keys of a CTA are distributed over some of the warps.
  template <typename F>
  __device__ __forceinline__ void for_keys(const Gathered& all, const F& f) const {
    const int parts = kClusterSmemWarps / cluster_row.size, r = cluster_row.warp() / parts, lane = lane_id();
    if (r >= cluster_row.size) return;
    const uint32_t base = __reduce_add_sync(kAllLanes, lane < r ? all.count : 0),
                   n = __shfl_sync(kAllLanes, all.count, r);
    const uint32_t from = ptx::of_rank(keys(), r);
    for (uint32_t i = (cluster_row.warp() - r * parts) * 32 + lane; i < n; i += parts * 32)
      f(ptx::load_of_rank(from + 4 * i), base + i);
  }

  // Return the need-th largest of at most kRankedKeys keys. Each thread ranks one key.
  __device__ __forceinline__ uint32_t rank_keys(const Gathered& all, uint32_t need) const {
    uint32_t* few = ranked_keys();
    for_keys(all, [&](uint32_t key, uint32_t number) { few[number] = key; });
    __syncthreads();
    if (threadIdx.x < all.total) {
      const uint32_t own = few[threadIdx.x];
      uint32_t above = 0, reach = 0;
#pragma unroll 4
      for (uint32_t i = 0; i < all.total; ++i) {
        const uint32_t key = few[i];
        above += key > own, reach += key >= own;
      }
      if (above < need && need <= reach) scratch().found_position = own;
    }
    __syncthreads();
    return scratch().found_position;
  }

  // Narrow the interval by levels of bins over the gathered keys until one key is left. Every CTA computes
  // the same.
  template <bool kBySum>
  __device__ __forceinline__ ThresholdKey search_gathered(const Gathered& all, uint32_t low, uint32_t high,
                                                          uint64_t need, Weights weights) const {
    constexpr int kLocalBinsPerThread = kLocalBins / 256;
    uint32_t* words = bins();
    uint64_t value;
    do {
      Bins<kLocalBins> split(low, high);
      clear(words, kBySum ? 2 * kLocalBins : kLocalBins);
      for_keys(all, [&](uint32_t key, uint32_t) {
        if (!split.holds(key)) return;
        if constexpr (kBySum) weights.add(words + 2 * split.bin_of(key), __uint_as_float(key));
        if constexpr (!kBySum) atomicAdd(words + split.bin_of(key), 1u);
      });
      __syncthreads();
      uint64_t values[kLocalBinsPerThread];
#pragma unroll
      for (int i = 0; i < kLocalBinsPerThread; ++i) {
        const int bin = kLocalBins - 1 - (kLocalBinsPerThread * static_cast<int>(threadIdx.x) + i);
        values[i] = 0;
        if (bin >= 0) values[i] = kBySum ? weights.sum(words[2 * bin], words[2 * bin + 1]) : words[bin];
      }
      const FoundBin found = find_bin(values, need, kLocalBins - 1);
      need = need > found.above ? need - found.above : 1;
      split.narrow(kLocalBins - 1 - found.position);
      low = split.low, high = split.high, value = found.value;
    } while (low < high);
    return {low, value};
  }

  // Return the threshold in [low, high]. Gather the keys of the interval. While they are too many, narrow it
  // by bins.
  template <typename Key, bool kBySum>
  __device__ __forceinline__ ThresholdKey resolve(uint32_t low, uint32_t high, uint64_t need, Weights weights) {
    constexpr int kCount = kBySum ? kBins / 2 : kBins;
    uint64_t value;
    do {
      const Gathered all = gather<Key>(low, high);
      if (all.fits) {
        if (kBySum || all.total > kRankedKeys) return search_gathered<kBySum>(all, low, high, need, weights);
        need = need > all.total ? all.total : need;
        return {rank_keys(all, static_cast<uint32_t>(need < 1 ? 1 : need)), 0};
      }
      Bins<kCount> split(low, high);
      uint32_t* words = bins();
      clear(words, kBins);
      for_each([&](float x) {
        const uint32_t key = Key::key(x);
        if (!split.holds(key)) return;
        if constexpr (kBySum) weights.add(words + 2 * split.bin_of(key), x);
        if constexpr (!kBySum) atomicAdd(words + split.bin_of(key), 1u);
      });
      const FoundBin found = find_in<kBySum>(need, weights);
      need = need > found.above ? need - found.above : 1;
      split.narrow(kCount - 1 - found.position);
      low = split.low, high = split.high, value = found.value;
    } while (low < high);
    return {low, value};
  }

  // Return the k-th largest of one value per thread.
  __device__ __forceinline__ uint32_t lower_bound_of_kth(uint32_t own, uint32_t k) const {
    uint32_t* all = bins();
    all[threadIdx.x] = own;
    __syncthreads();
    uint32_t above = 0, reach = 0;
#pragma unroll 4
    for (int i = 0; i < kClusterSmemThreads; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(all + i);
      for (uint32_t key : {four.x, four.y, four.z, four.w}) above += key > own, reach += key >= own;
    }
    if (above < k && k <= reach) scratch().found_position = own;
    __syncthreads();
    return scratch().found_position;
  }

  // Return the key of the k-th largest element, 1 <= k < n. Padding has the smallest key.
  template <typename Key>
  __device__ __forceinline__ uint32_t top_k_key(uint32_t max_key, uint64_t k) {
    static_assert(kClusterSmemThreads >= kClusterSmemChunks);
    if (2 * k <=
        static_cast<uint64_t>(cluster_row.chunks)) {  // at least k chunks have an element that reaches the bound
      const uint32_t own = threadIdx.x < cluster_row.chunks ? Key::key(maxima()[threadIdx.x]) : 0;
      return resolve<Key, false>(lower_bound_of_kth(own, static_cast<uint32_t>(k)), max_key, k, {}).key;
    }
    const Octaves octaves = Octaves::up_to(max_key);
    uint32_t* words = bins();
    clear(words, kBins);
    // At least k threads have an element that reaches the k-th largest of the threads' maxima.
    const bool few = k <= 4 * static_cast<uint64_t>(cluster_row.chunks);
    if (few) {
      uint32_t largest = 0;
      for_each([&](float x) { largest = max(largest, Key::key(x)); });
      atomicAdd(words + octaves.bin_of(largest), 1u);
    } else {
      for_each([&](float x) { atomicAdd(words + octaves.bin_of(Key::key(x)), 1u); });
    }
    const FoundBin found = find_in<false>(k, {});
    const uint32_t bin = kBins - 1 - found.position;
    const uint32_t low = octaves.low(bin);
    uint32_t high = max_key;
    uint64_t need = k;
    if (!few) high = min(octaves.high(bin), max_key), need = k > found.above ? k - found.above : 1;
    return resolve<Key, false>(low, high, need, {}).key;
  }

  // Return the threshold of top-p, as top_p_threshold() in threshold.cuh.
  __device__ __forceinline__ float top_p(double p, const Totals& row_totals, float largest) {
    if (!(p > 0)) return largest;
    const uint32_t max_key = __float_as_uint(largest);
    const Octaves octaves = Octaves::up_to(max_key);
    const double mass = row_totals.real(), target = p * mass;
    const uint32_t least = __float_as_uint(static_cast<float>((1 - p) * mass / cluster_row.n) * 0.999f);
    const uint64_t needed_weight = static_cast<uint64_t>(p * 0x1p30);
    uint32_t* words = bins();
    clear(words, kBins);
    {
      const Normalizer by = Normalizer::of(mass * 0x1p-30);
      for_each([&](float x) {
        const uint32_t key = __float_as_uint(x);
        if (key < least) return;
        atomicAdd(words + octaves.bin_of(key), share_weight(x, by));
      });
    }
    const FoundBin found = find_in<false>(needed_weight, {});
    const uint32_t bin = kBins - 1 - found.position, low = octaves.low(bin), high = min(octaves.high(bin), max_key);
    const Weights weights = Weights::of(high, cluster_row.n);
    const auto kept = [&](uint32_t key) {
      sum_kept(__uint_as_float(key));
      return totals(row_totals.fixed).real();
    };
    const auto find_key = [&](uint64_t need) { return resolve<Unsigned, true>(low, high, need, weights); };
    return exact_threshold(weights, needed_weight, found.above, mass, high, max_key, target, row_totals.fixed, find_key,
                           kept);
  }
};

}  // namespace flashinfer::cuda
