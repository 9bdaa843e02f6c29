// Rows in the shared memory of a cluster, two chunks to a warp: one read of global memory, and passes over what is
// held. Each thread reads and writes its own elements alone, as it would its registers, so that passes need no barrier.
//
// Definitions, sums and their order are those of engine.cuh.
#pragma once

#include <flashinfer/cuda/sampling/engine.cuh>

namespace flashinfer::cuda {

constexpr int kHeldThreads = 256, kHeldBlocks = 3;  // of a block, and blocks to an SM
constexpr int kHeldWarps = kHeldThreads / 32;
constexpr int kOwnChunks = 32;                         // of a block, at most
constexpr int kHeldChunks = kMaxCluster * kOwnChunks;  // of a row, at most
constexpr int kOwnKeys = 512;                          // that a block gathers
constexpr int kFewKeys = 256;                          // that are copied, and ranked one by one

struct Held {
  Engine<false> e;

  // Two arrays of sums, one of maxima, bins, keys, and the chunks.
  static int64_t bytes(int64_t own) {
    return (3 * kHeldChunks + kBins + kOwnKeys + kFewKeys + own * kSumChunk) * int64_t{4};
  }
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(shared_bytes()) + e.sums_at * kHeldChunks;
  }
  __device__ __forceinline__ float* maxima() const {
    return reinterpret_cast<float*>(shared_bytes()) + 2 * kHeldChunks;
  }
  __device__ __forceinline__ uint32_t* bins() const {
    return reinterpret_cast<uint32_t*>(shared_bytes()) + 3 * kHeldChunks;
  }
  __device__ __forceinline__ uint32_t* keys() const { return bins() + kBins; }
  __device__ __forceinline__ uint32_t* few_keys() const { return keys() + kOwnKeys; }

  // Of the warp's chunks.
  __device__ __forceinline__ int chunk(int which) const { return e.first + e.warp() + which * kHeldWarps; }
  __device__ __forceinline__ bool has(int which) const { return e.warp() + which * kHeldWarps < e.own; }

  // Where the thread has its part of a chunk.
  __device__ __forceinline__ float4* at(int which) const {
    float* row = reinterpret_cast<float*>(few_keys() + kFewKeys) + (e.warp() + which * kHeldWarps) * kSumChunk;
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

  // f(chunk, which) of the warp's chunks.
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

  // f(first, second, which) of two of the warp's chunks at a time; of one that is not there all is 0.
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
  __device__ __forceinline__ void tell(float* to, int which, float value) const {
    e.tell_pair(to, chunk(which), has(which + 1), value);
  }

  // The first pass, from global memory: loads are on their way before the blocks of the cluster have met.
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
      if (which == 0) e.wait();
      if (has(which)) f(one, other, which);
    }
  }

  // Chunks become change(x), at first of what the row has and else of what is held; each block learns of all sums and,
  // with kMaxima, of all maxima.
  template <bool kMaxima, typename Read, typename F>
  __device__ __forceinline__ void transform(const Read& read, const F& change) {
    e.sums_at ^= 1, e.summed = -1;
    e.begin(kMaxima ? 2 * e.chunks : e.chunks);
    read([&](Chunk& one, Chunk& other, int which) {
      one.each([&](float& x) { x = change(x); });
      other.each([&](float& x) { x = change(x); });
      put_two(one, other, which);
      if constexpr (kMaxima) tell(maxima(), which, pair_max<true>(one, other));
      tell(sums(), which, pair_sum(one, other, [](float x) { return x; }));
    });
    e.meet(), ++e.pass;
  }
  template <bool kMaxima, typename F>
  __device__ __forceinline__ void transform(const F& change) {
    transform<kMaxima>([&](const auto& f) { each_two(f); }, change);
  }
  template <bool kNaN>
  __device__ __forceinline__ void read_maxima(const Source& source, float padding) {
    e.begin(e.chunks);
    read(source, padding, [&](Chunk& one, Chunk& other, int which) {
      put_two(one, other, which);
      tell(maxima(), which, pair_max<kNaN>(one, other));
    });
    e.meet(), ++e.pass;
  }
  __device__ __forceinline__ void sum_kept(float t) {
    if (e.summed == t) return;
    e.sums_at ^= 1, e.summed = t;
    e.begin(e.chunks);
    each_two([&](const Chunk& one, const Chunk& other, int which) {
      tell(sums(), which, pair_sum(one, other, [t](float x) { return x >= t ? x : 0.0f; }));
    });
    e.meet(), ++e.pass;
  }

  // A thread has a chunk's sum.
  __device__ __forceinline__ Totals add_up(FixedPoint fixed, uint32_t most) const {
    __shared__ uint64_t parts[kHeldWarps];
    const bool valid = most != 0 && most <= 0x7f7fffffu;
    const int c = threadIdx.x;
    const uint64_t own = warp_sum(valid && c < e.chunks ? fixed(sums()[c]) : 0);
    __syncthreads();  // parts are not read any more
    if (lane_id() == 0) parts[e.warp()] = own;
    __syncthreads();
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < kHeldChunks / 32; ++i) total += parts[i];
    return {fixed, total, valid};
  }
  __device__ __forceinline__ Totals totals(FixedPoint fixed) const {
    return add_up(fixed, e.largest_bits(sums(), e.chunks));
  }
  __device__ __forceinline__ Totals totals() const {
    const uint32_t most = e.largest_bits(sums(), e.chunks);
    return add_up(FixedPoint::of(__uint_as_float(most)), most);
  }
  __device__ __forceinline__ float largest() const { return __uint_as_float(e.largest_bits(maxima(), e.chunks)); }
};

}  // namespace flashinfer::cuda
