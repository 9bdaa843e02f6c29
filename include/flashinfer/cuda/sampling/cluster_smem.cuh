// Rows in the shared memory of a cluster: one read from global memory, then passes over shared memory. A warp
// processes two chunks at a time. A thread accesses only elements that it has stored itself, so passes need no
// barrier.
//
// Definitions, sums and their order equal those of engine.cuh.
#pragma once

#include <flashinfer/cuda/sampling/engine.cuh>

namespace flashinfer::cuda {

constexpr int kClusterSmemThreads = 256, kClusterSmemBlocks = 3;  // threads of a CTA; CTAs per SM
constexpr int kClusterSmemWarps = kClusterSmemThreads / 32;
constexpr int kOwnChunks = 32;                                // of a CTA, at most
constexpr int kClusterSmemChunks = kMaxCluster * kOwnChunks;  // of a row, at most
constexpr int kOwnKeys = 512;                                 // keys that a CTA gathers, at most
constexpr int kFewKeys = 256;                                 // keys that are copied and ranked one by one, at most

struct ClusterSmem {
  GlobalRow engine;

  // Bytes of two arrays of sums, one of maxima, bins, keys and the chunks.
  static int64_t bytes(int64_t own) {
    return (3 * kClusterSmemChunks + kBins + kOwnKeys + kFewKeys + own * kSumChunk) * int64_t{4};
  }
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(shared_bytes()) + engine.sums_at * kClusterSmemChunks;
  }
  __device__ __forceinline__ float* maxima() const {
    return reinterpret_cast<float*>(shared_bytes()) + 2 * kClusterSmemChunks;
  }
  __device__ __forceinline__ uint32_t* bins() const {
    return reinterpret_cast<uint32_t*>(shared_bytes()) + 3 * kClusterSmemChunks;
  }
  __device__ __forceinline__ uint32_t* keys() const { return bins() + kBins; }
  __device__ __forceinline__ uint32_t* few_keys() const { return keys() + kOwnKeys; }

  // The warp's chunks.
  __device__ __forceinline__ int chunk(int which) const {
    return engine.first + engine.warp() + which * kClusterSmemWarps;
  }
  __device__ __forceinline__ bool has(int which) const {
    return engine.warp() + which * kClusterSmemWarps < engine.own;
  }

  // Return the thread's part of a chunk in shared memory.
  __device__ __forceinline__ float4* at(int which) const {
    float* row =
        reinterpret_cast<float*>(few_keys() + kFewKeys) + (engine.warp() + which * kClusterSmemWarps) * kSumChunk;
    return reinterpret_cast<float4*>(row + part_start(0));
  }
  __device__ __forceinline__ void put(const Chunk& x, int which) const {
    float4* to = at(which);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[32 * j] = make_float4(x.at[j][0], x.at[j][1], x.at[j][2], x.at[j][3]);
  }
  __device__ __forceinline__ void get(Chunk& x, int which) const {
    const float4* from = at(which);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 four = from[32 * j];
      x.at[j][0] = four.x, x.at[j][1] = four.y, x.at[j][2] = four.z, x.at[j][3] = four.w;
    }
  }

  // Call f(chunk, which) for the warp's chunks.
  template <typename F>
  __device__ __forceinline__ void each_chunk(const F& f) const {
#pragma unroll 1
    for (int which = 0; has(which); ++which) {
      Chunk x;
      get(x, which);
      f(x, which);
    }
  }
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    each_chunk([&](Chunk& x, int) { x.each([&](float& value) { f(value); }); });
  }

  // Call f(first, second, which) for pairs of the warp's chunks. A missing second chunk is 0.
  template <typename F>
  __device__ __forceinline__ void each_two(const F& f) const {
#pragma unroll 1
    for (int which = 0; has(which); which += 2) {
      Chunk one, other;
      get(one, which);
      if (has(which + 1)) {
        get(other, which + 1);
      } else {
        other.each([](float& x) { x = 0; });
      }
      f(one, other, which);
    }
  }
  __device__ __forceinline__ void put_two(const Chunk& one, const Chunk& other, int which) const {
    put(one, which);
    if (has(which + 1)) put(other, which + 1);
  }
  __device__ __forceinline__ void broadcast(float* to, int which, float value) const {
    engine.broadcast_pair(to, chunk(which), has(which + 1), value);
  }

  // Read the row from global memory, in the first pass. The first loads are issued before the cluster has started.
  template <typename F>
  __device__ __forceinline__ void read(const Source& source, float padding, const F& f) const {
#pragma unroll 1
    for (int which = 0; which == 0 || has(which); which += 2) {
      Chunk one, other;
      if (has(which)) source.load(one, int64_t{chunk(which)} * kSumChunk, padding);
      if (has(which + 1)) {
        source.load(other, int64_t{chunk(which + 1)} * kSumChunk, padding);
      } else {
        other.each([&](float& x) { x = padding; });
      }
      if (which == 0) engine.wait();
      if (has(which)) f(one, other, which);
    }
  }

  // Replace elements by change(x), read from the row in the first pass and from shared memory later.
  // Broadcast all sums and, with kMaxima, all maxima.
  template <bool kMaxima, typename Read, typename F>
  __device__ __forceinline__ void transform(const Read& read, const F& change) {
    engine.sums_at ^= 1, engine.summed = -1;
    engine.begin_pass(kMaxima ? 2 * engine.chunks : engine.chunks);
    read([&](Chunk& one, Chunk& other, int which) {
      one.each([&](float& x) { x = change(x); });
      other.each([&](float& x) { x = change(x); });
      put_two(one, other, which);
      if constexpr (kMaxima) broadcast(maxima(), which, pair_max<true>(one, other));
      broadcast(sums(), which, pair_sum(one, other, [](float x) { return x; }));
    });
    engine.end_pass(), ++engine.pass;
  }
  template <bool kMaxima, typename F>
  __device__ __forceinline__ void transform(const F& change) {
    transform<kMaxima>([&](const auto& f) { each_two(f); }, change);
  }
  template <bool kNaN>
  __device__ __forceinline__ void read_maxima(const Source& source, float padding) {
    engine.begin_pass(engine.chunks);
    read(source, padding, [&](Chunk& one, Chunk& other, int which) {
      put_two(one, other, which);
      broadcast(maxima(), which, pair_max<kNaN>(one, other));
    });
    engine.end_pass(), ++engine.pass;
  }
  __device__ __forceinline__ void sum_kept(float t) {
    if (engine.summed == t) return;
    engine.sums_at ^= 1, engine.summed = t;
    engine.begin_pass(engine.chunks);
    each_two([&](const Chunk& one, const Chunk& other, int which) {
      broadcast(sums(), which, pair_sum(one, other, [t](float x) { return x >= t ? x : 0.0f; }));
    });
    engine.end_pass(), ++engine.pass;
  }

  // Add the sums of all chunks, one per thread.
  __device__ __forceinline__ Totals add_up(FixedPoint fixed, uint32_t max_bits) const {
    __shared__ uint64_t parts[kClusterSmemWarps];
    const bool valid = max_bits != 0 && max_bits <= 0x7f7fffffu;
    const int c = threadIdx.x;
    const uint64_t own = lanes_sum<32>(valid && c < engine.chunks ? fixed(sums()[c]) : 0);
    __syncthreads();  // parts are no longer read
    if (lane_id() == 0) parts[engine.warp()] = own;
    __syncthreads();
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < kClusterSmemChunks / 32; ++i) total += parts[i];
    return {fixed, total, valid};
  }
  __device__ __forceinline__ Totals totals(FixedPoint fixed) const {
    return add_up(fixed, engine.largest_bits(sums(), engine.chunks));
  }
  __device__ __forceinline__ Totals totals() const {
    const uint32_t max_bits = engine.largest_bits(sums(), engine.chunks);
    return add_up(FixedPoint::of(__uint_as_float(max_bits)), max_bits);
  }
  __device__ __forceinline__ float largest() const {
    return __uint_as_float(engine.largest_bits(maxima(), engine.chunks));
  }
};

}  // namespace flashinfer::cuda
