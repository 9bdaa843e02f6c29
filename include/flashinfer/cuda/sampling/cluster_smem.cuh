// Rows in the shared memory of a cluster: one read from global memory, then passes over shared memory. A warp
// processes two chunks at a time. A thread accesses only elements that it has stored itself, so passes need
// no barrier.
//
// Definitions, sums and their order equal those of cluster_row.cuh.
#pragma once

#include <flashinfer/cuda/sampling/cluster_row.cuh>

namespace flashinfer::cuda {

constexpr int kClusterSmemThreads = 256, kClusterSmemBlocks = 3;  // threads per CTA; CTAs per SM
constexpr int kClusterSmemWarps = kClusterSmemThreads / 32;
constexpr int kChunksPerCta = 32;                                // largest number of chunks of a CTA
constexpr int kClusterSmemChunks = kMaxCluster * kChunksPerCta;  // largest number of chunks of a row
constexpr int kKeysPerCta = 512;                                 // largest number of keys that a CTA gathers
constexpr int kRankedKeys = 256;  // largest number of keys that are copied and ranked one by one

struct ClusterSmem {
  GlobalRow cluster_row;

  // Bytes of two arrays of sums, one of maxima, bins, keys and the chunks.
  static int64_t bytes(int64_t own) {
    return (3 * kClusterSmemChunks + kBins + kKeysPerCta + kRankedKeys + own * kSumChunk) * int64_t{4};
  }
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(shared_bytes()) + cluster_row.sums_buffer * kClusterSmemChunks;
  }
  __device__ __forceinline__ float* maxima() const {
    return reinterpret_cast<float*>(shared_bytes()) + 2 * kClusterSmemChunks;
  }
  __device__ __forceinline__ uint32_t* bins() const {
    return reinterpret_cast<uint32_t*>(shared_bytes()) + 3 * kClusterSmemChunks;
  }
  __device__ __forceinline__ uint32_t* keys() const { return bins() + kBins; }
  __device__ __forceinline__ uint32_t* ranked_keys() const { return keys() + kKeysPerCta; }

  // Return the index in the row of the warp's chunk number `warp_chunk`.
  __device__ __forceinline__ int chunk(int warp_chunk) const {
    return cluster_row.first + cluster_row.warp() + warp_chunk * kClusterSmemWarps;
  }
  __device__ __forceinline__ bool has(int warp_chunk) const {
    return cluster_row.warp() + warp_chunk * kClusterSmemWarps < cluster_row.num_own;
  }

  // Return the thread's part of a chunk in shared memory.
  __device__ __forceinline__ float4* at(int warp_chunk) const {
    float* row = reinterpret_cast<float*>(ranked_keys() + kRankedKeys) +
                 (cluster_row.warp() + warp_chunk * kClusterSmemWarps) * kSumChunk;
    return reinterpret_cast<float4*>(row + part_start(0));
  }
  __device__ __forceinline__ void store_warp_chunk(const Chunk& x, int warp_chunk) const {
    float4* to = at(warp_chunk);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[32 * j] = make_float4(x.at[j][0], x.at[j][1], x.at[j][2], x.at[j][3]);
  }
  __device__ __forceinline__ void load_warp_chunk(Chunk& x, int warp_chunk) const {
    const float4* from = at(warp_chunk);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 four = from[32 * j];
      x.at[j][0] = four.x, x.at[j][1] = four.y, x.at[j][2] = four.z, x.at[j][3] = four.w;
    }
  }

  // Call f(chunk, warp_chunk) for the warp's chunks.
  template <typename F>
  __device__ __forceinline__ void for_chunks(const F& f) const {
#pragma unroll 1
    for (int warp_chunk = 0; has(warp_chunk); ++warp_chunk) {
      Chunk x;
      load_warp_chunk(x, warp_chunk);
      f(x, warp_chunk);
    }
  }
  template <typename F>
  __device__ __forceinline__ void for_each(const F& f) const {
    for_chunks([&](Chunk& x, int) { x.for_each([&](float& value) { f(value); }); });
  }

  // Call f(first, second, warp_chunk) for pairs of the warp's chunks. A missing second chunk is 0.
  template <typename F>
  __device__ __forceinline__ void for_chunk_pairs(const F& f) const {
#pragma unroll 1
    for (int warp_chunk = 0; has(warp_chunk); warp_chunk += 2) {
      Chunk one, other;
      load_warp_chunk(one, warp_chunk);
      if (has(warp_chunk + 1)) {
        load_warp_chunk(other, warp_chunk + 1);
      } else {
        other.for_each([](float& x) { x = 0; });
      }
      f(one, other, warp_chunk);
    }
  }
  __device__ __forceinline__ void store_pair(const Chunk& one, const Chunk& other, int warp_chunk) const {
    store_warp_chunk(one, warp_chunk);
    if (has(warp_chunk + 1)) store_warp_chunk(other, warp_chunk + 1);
  }
  __device__ __forceinline__ void broadcast(float* to, int warp_chunk, float value) const {
    cluster_row.broadcast_pair(to, chunk(warp_chunk), has(warp_chunk + 1), value);
  }

  // Read the row from global memory, in the first pass. The first loads are issued before the cluster has
  // started.
  template <typename F>
  __device__ __forceinline__ void read(const Source& source, float padding, const F& f) const {
#pragma unroll 1
    for (int warp_chunk = 0; warp_chunk == 0 || has(warp_chunk); warp_chunk += 2) {
      Chunk one, other;
      if (has(warp_chunk)) source.load(one, int64_t{chunk(warp_chunk)} * kSumChunk, padding);
      if (has(warp_chunk + 1)) {
        source.load(other, int64_t{chunk(warp_chunk + 1)} * kSumChunk, padding);
      } else {
        other.for_each([&](float& x) { x = padding; });
      }
      if (warp_chunk == 0) cluster_row.wait();
      if (has(warp_chunk)) f(one, other, warp_chunk);
    }
  }

  // Replace elements by change(x), read from the row in the first pass and from shared memory later.
  // Broadcast all sums and, with kMaxima, all maxima.
  template <bool kMaxima, typename Read, typename F>
  __device__ __forceinline__ void transform(const Read& read, const F& change) {
    cluster_row.sums_buffer ^= 1, cluster_row.sum_threshold = -1;
    cluster_row.begin_pass(kMaxima ? 2 * cluster_row.chunks : cluster_row.chunks);
    read([&](Chunk& one, Chunk& other, int warp_chunk) {
      one.for_each([&](float& x) { x = change(x); });
      other.for_each([&](float& x) { x = change(x); });
      store_pair(one, other, warp_chunk);
      if constexpr (kMaxima) broadcast(maxima(), warp_chunk, pair_max<true>(one, other));
      broadcast(sums(), warp_chunk, pair_sum(one, other, [](float x) { return x; }));
    });
    cluster_row.end_pass(), ++cluster_row.pass;
  }
  template <bool kMaxima, typename F>
  __device__ __forceinline__ void transform(const F& change) {
    transform<kMaxima>([&](const auto& f) { for_chunk_pairs(f); }, change);
  }
  template <bool kNaN>
  __device__ __forceinline__ void read_maxima(const Source& source, float padding) {
    cluster_row.begin_pass(cluster_row.chunks);
    read(source, padding, [&](Chunk& one, Chunk& other, int warp_chunk) {
      store_pair(one, other, warp_chunk);
      broadcast(maxima(), warp_chunk, pair_max<kNaN>(one, other));
    });
    cluster_row.end_pass(), ++cluster_row.pass;
  }
  __device__ __forceinline__ void sum_kept(float t) {
    if (cluster_row.sum_threshold == t) return;
    cluster_row.sums_buffer ^= 1, cluster_row.sum_threshold = t;
    cluster_row.begin_pass(cluster_row.chunks);
    for_chunk_pairs([&](const Chunk& one, const Chunk& other, int warp_chunk) {
      broadcast(sums(), warp_chunk, pair_sum(one, other, [t](float x) { return x >= t ? x : 0.0f; }));
    });
    cluster_row.end_pass(), ++cluster_row.pass;
  }

  // Add the sums of all chunks, one per thread.
  __device__ __forceinline__ Totals fixed_total(FixedPoint fixed, uint32_t max_bits) const {
    __shared__ uint64_t parts[kClusterSmemWarps];
    const bool valid = max_bits != 0 && max_bits <= 0x7f7fffffu;
    const int c = threadIdx.x;
    const uint64_t own = lanes_sum<32>(valid && c < cluster_row.chunks ? fixed(sums()[c]) : 0);
    __syncthreads();  // parts are no longer read
    if (lane_id() == 0) parts[cluster_row.warp()] = own;
    __syncthreads();
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < kClusterSmemChunks / 32; ++i) total += parts[i];
    return {fixed, total, valid};
  }
  __device__ __forceinline__ Totals totals(FixedPoint fixed) const {
    return fixed_total(fixed, cluster_row.largest_bits(sums(), cluster_row.chunks));
  }
  __device__ __forceinline__ Totals totals() const {
    const uint32_t max_bits = cluster_row.largest_bits(sums(), cluster_row.chunks);
    return fixed_total(FixedPoint::of(__uint_as_float(max_bits)), max_bits);
  }
  __device__ __forceinline__ float largest() const {
    return __uint_as_float(cluster_row.largest_bits(maxima(), cluster_row.chunks));
  }
};

}  // namespace flashinfer::cuda
