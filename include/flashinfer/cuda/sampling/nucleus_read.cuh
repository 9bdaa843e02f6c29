// One read of a row that serves many thresholds.
//
// Four elements of a lane form a group. The read stores one number per group: the sum of its elements above
// an interval, in the order of first_sums() (chunk.cuh). If an element of the group lies in the interval, all
// four are collected. For each t of the interval, the elements >= t can then be summed without rereading the
// row, with the bits of the order of common/fixed_sum.h.
#pragma once

#include <flashinfer/cuda/ptx/scan.cuh>
#include <flashinfer/cuda/sampling/stream.cuh>

namespace flashinfer::cuda {

constexpr int kNucleusThreads = 512;
constexpr int kNucleusWarps = kNucleusThreads / 32;
constexpr int kSampleBins = 4 * kNucleusThreads;
constexpr int kCollectedGroups = 4192;  // groups of four elements that can be collected
constexpr int kPairsAhead = 3;          // pairs per warp of the next row in flight to the L2 cache

struct Interval {
  float low, high;
};

struct NucleusRead : ClusterSmemRow {
  int first_pair, own_pairs;

  static int64_t bytes() {
    return (3 * kClusterSmemChunks + kBins + kSampleBins + kClusterSmemChunks * (kSumChunk / 4) +
            5 * kCollectedGroups) *
           int64_t{4};
  }

  // Functions construct it again instead of taking it as an argument, because it has few members.
  __device__ __forceinline__ explicit NucleusRead(int n) {
    cluster_row = GlobalRow{};
    cluster_row.n = n, cluster_row.chunks = cluster_row.num_own = static_cast<int>(num_chunks(n)), cluster_row.size = 1;
    const int pairs = (cluster_row.chunks + 1) / 2;
    first_pair = cluster_row.warp() * pairs / kNucleusWarps;
    own_pairs = (cluster_row.warp() + 1) * pairs / kNucleusWarps - first_pair;
  }

  __device__ __forceinline__ uint32_t* sample() const { return bins() + kBins; }
  __device__ __forceinline__ float* groups() const { return reinterpret_cast<float*>(sample() + kSampleBins); }
  // Collected groups: four elements and the group's index, in five arrays of kCollectedGroups words.
  __device__ __forceinline__ float* collected() const { return groups() + kClusterSmemChunks * (kSumChunk / 4); }
  __device__ __forceinline__ float4 of_group(uint32_t i) const {
    const float* at = collected() + i;
    return make_float4(at[0], at[kCollectedGroups], at[2 * kCollectedGroups], at[3 * kCollectedGroups]);
  }
  __device__ __forceinline__ uint32_t group_index(uint32_t i) const {
    return __float_as_uint(collected()[4 * kCollectedGroups + i]);
  }

  // Start in the middle of the warp's pairs, so that the first pairs are spread over the row.
  __device__ __forceinline__ int chunk_of(int pair) const {
    const int at = pair + own_pairs / 2;
    return 2 * (first_pair + (at < own_pairs ? at : at - own_pairs));
  }

  // Load a pair of chunks, four elements per access. Elements after the end are 0.
  template <bool kReread, typename T>
  __device__ __forceinline__ void load(Chunk (&pair)[2], const T* source, int at) const {
    if (at < 0 || at >= own_pairs) return;
    const int c = chunk_of(at), left = cluster_row.remaining(c);
    const T* from = source + c * kSumChunk + part_start(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float (&to)[4] = pair[i / 4].at[i % 4];
      to[0] = to[1] = to[2] = to[3] = 0;
      if (i * 128 + part_start(0) < left) read4<T>(from + i * 128, kReread).to_floats(to);
    }
  }
  template <typename T>
  __device__ __forceinline__ void prefetch(const T* source, int pair) const {
    constexpr int kLine = 128 / sizeof(T);
    if (source == nullptr || pair < 0 || pair >= own_pairs || lane_id() * kLine >= 2 * kSumChunk) return;
    const int at = chunk_of(pair) * kSumChunk + lane_id() * kLine;
    if (at < cluster_row.n) ptx::prefetch_l2(source + at);
  }

  __device__ __forceinline__ void store_sums(float* to, int pair, float value) const {
    const int c = chunk_of(pair) + (lane_id() >> 4);
    if ((lane_id() & 15) == 0 && c < cluster_row.chunks) to[c] = value;
  }
  __device__ __forceinline__ Totals fixed_total(FixedPoint fixed, uint32_t max_bits) const {
    const bool valid = max_bits != 0 && max_bits <= 0x7f7fffffu;
    uint64_t total = 0;
    for (int c = lane_id(); valid && c < cluster_row.chunks; c += 32) total += fixed(sums()[c]);
    return {fixed, lanes_sum<32>(total), valid};
  }
  __device__ __forceinline__ Totals totals(FixedPoint fixed) const {
    return fixed_total(fixed, cluster_row.largest_bits(sums(), cluster_row.chunks));
  }
  __device__ __forceinline__ Totals totals() const {
    const uint32_t max_bits = cluster_row.largest_bits(sums(), cluster_row.chunks);
    return fixed_total(FixedPoint::of(__uint_as_float(max_bits)), max_bits);
  }

  // Store the sums of both chunks of a pair, and for each group the sum of its elements above the interval.
  // Collect the groups with an element in the interval.
  __device__ __forceinline__ void process(Chunk (&chunks)[2], int pair, const Interval& interval) const {
    uint32_t found = 0;
    const int c = chunk_of(pair);
    float* to = groups() + c * (kSumChunk / 4) + part_start(0);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      Chunk& x = chunks[which];
      x.for_each([](float& value) { value = max_nan(value, 0.0f); });
      float above[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Multiply by 0 or 1 instead of selecting: products run on other units than comparisons. They are NaN
        // for infinities, but rows with infinities are invalid.
        float taken[4], below[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          taken[j] = x.at[j][i] * (x.at[j][i] >= interval.high ? 1.0f : 0.0f);
          below[j] = x.at[j][i] - taken[j];
        }
        above[i] = (taken[0] + taken[2]) + (taken[1] + taken[3]);
        if (fmaxf(fmaxf(below[0], below[2]), fmaxf(below[1], below[3])) >= interval.low) found |= 1u << (4 * which + i);
      }
      // Every group has an entry, also those after the row's end.
      *reinterpret_cast<float4*>(to + which * (kSumChunk / 4)) = make_float4(above[0], above[1], above[2], above[3]);
    }
    store_sums(sums(), pair, pair_sum(chunks[0], chunks[1], [](float x) { return x; }));
    if (!__any_sync(kAllLanes, found)) return;
    const uint32_t own = __popc(found), end = ptx::warp_inclusive_sum(own), all = __shfl_sync(kAllLanes, end, 31);
    uint32_t base = 0;
    if (lane_id() == 0) base = ptx::atomic_add_shared(ptx::shared_address(&scratch().counter), all);
    base = __shfl_sync(kAllLanes, base, 0);
    if (base + all > kCollectedGroups) return;
    float* put = collected() + base + end - own;
    const int group_index = c * (kSumChunk / 4) + part_start(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (!(found >> i & 1)) continue;
      const Chunk& x = chunks[i / 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) put[j * kCollectedGroups] = x.at[j][i % 4];
      put[4 * kCollectedGroups] = __uint_as_float(group_index + i / 4 * (kSumChunk / 4) + i % 4);
      ++put;
    }
  }

  // Process all pairs of the row. The caller has loaded the first two.
  template <bool kReread, typename T>
  __device__ __forceinline__ void pass(Chunk (&even)[2], Chunk (&odd)[2], const T* source,
                                       const Interval& interval) const {
    if (threadIdx.x == 0) scratch().counter = 0;
    __syncthreads();
#pragma unroll 1
    for (int pair = 0; pair < own_pairs; pair += 2) {
      process(even, pair, interval);
      load<kReread>(even, source, pair + 2);
      if (pair + 1 >= own_pairs) break;
      process(odd, pair + 1, interval);
      load<kReread>(odd, source, pair + 3);
    }
    __syncthreads();
  }

  // Call f(x) for the collected elements.
  template <typename F>
  __device__ __forceinline__ void for_collected(uint32_t count, const F& f) const {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      const float4 four = of_group(i);
      f(four.x), f(four.y), f(four.z), f(four.w);
    }
  }

  // Sum the elements above the interval and the collected ones >= t. Return the total. This is one function,
  // because a kernel larger than the instruction cache stalls at each row.
  __device__ __noinline__ static uint64_t sum_of(int n, uint32_t count, float t, FixedPoint fixed) {
    return NucleusRead(n).sum_from(count, t, fixed);
  }
  __device__ __forceinline__ uint64_t sum_from(uint32_t count, float t, FixedPoint fixed) const {
    const auto kept = [t](float x) { return x >= t ? x : 0.0f; };
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
      const float4 four = of_group(i);
      groups()[group_index(i)] = (kept(four.x) + kept(four.z)) + (kept(four.y) + kept(four.w));
    }
    uint64_t own = 0;
    __syncthreads();
#pragma unroll 4
    for (int pair = 0; pair < own_pairs; ++pair) {
      const auto sums_of = [&](int c) {
        Sums s;
        const float4 four = *reinterpret_cast<const float4*>(groups() + c * (kSumChunk / 4) + part_start(0));
        s.at[0] = four.x, s.at[1] = four.y, s.at[2] = four.z, s.at[3] = four.w;
        return s;
      };
      const int c = chunk_of(pair);
      const float sum = pair_sum(sums_of(c), sums_of(c + 1));
      store_sums(sums(), pair, sum);
      own += fixed(sum);
    }
    own += __shfl_xor_sync(kAllLanes, own, 16);
    if (lane_id() == 0) scratch().warp_totals[cluster_row.warp()] = own;
    __syncthreads();
    return lanes_sum<32>(lane_id() < kNucleusWarps ? scratch().warp_totals[lane_id()] : 0);
  }

  // Store change(x) of all elements to `to`, in reverse order: the pairs that were read last come first.
  template <typename T, typename F>
  __device__ __forceinline__ void map(const T* source, T* to, const F& change) const {
    const auto put = [&](const Chunk(&pair)[2], int at) {
      const int c = chunk_of(at), left = cluster_row.remaining(c);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = change(max_nan(pair[i / 4].at[i % 4][j], 0.0f));
        const int more = part_start(0) + i * 128;
        if (more < left) store_vec(to + c * kSumChunk + more, Vec<T, 4>::from_floats(values));
      }
    };
    Chunk even[2], odd[2];
    load<false>(even, source, own_pairs - 1), load<false>(odd, source, own_pairs - 2);
#pragma unroll 1
    for (int pair = own_pairs - 1; pair >= 0; pair -= 2) {
      put(even, pair);
      load<false>(even, source, pair - 2);
      if (pair == 0) break;
      put(odd, pair - 1);
      load<false>(odd, source, pair - 3);
    }
  }
};

}  // namespace flashinfer::cuda
