// Rows that a persistent CTA streams one after the other. Copies of later pairs of chunks, also of the next
// row, are in flight while earlier pairs are processed in registers.
//
// A thread reads only elements that it has copied itself, so copies need no barrier.
#pragma once

#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/sampling/cluster_smem_rows.cuh>

namespace flashinfer::cuda {

constexpr int kStreamBlocks = 2;                  // CTAs per SM
constexpr int kPairs = kClusterSmemChunks / 2;    // of a row, at most
constexpr int kMinPairs = 2 * kClusterSmemWarps;  // of a row: two per warp
constexpr int kCollected = 6400;                  // collected elements, at most

struct PipelinedRow : ClusterSmemRow {
  int first_pair, own_pairs;  // of the warp
  uint32_t pairs_read;        // pairs that the warp has read

  static int64_t bytes() {
    return (3 * kClusterSmemChunks + kBins + kCollected + kCollected / 2 + 2 * kPairs +
            kClusterSmemWarps * 4 * kSumChunk) *
           int64_t{4};
  }
  static bool fits(int64_t vocab_size) {
    const int64_t chunks = num_chunks(vocab_size);
    return chunks >= 2 * kMinPairs && chunks <= kClusterSmemChunks;
  }

  __device__ static PipelinedRow of(int64_t n) {
    PipelinedRow x;
    x.cluster_row = GlobalRow::of(n);
    const int pairs = (x.cluster_row.chunks + 1) / 2;
    x.first_pair = x.cluster_row.warp() * pairs / kClusterSmemWarps;
    x.own_pairs = (x.cluster_row.warp() + 1) * pairs / kClusterSmemWarps - x.first_pair;
    x.pairs_read = 0;
    return x;
  }

  __device__ __forceinline__ uint16_t* positions() const { return reinterpret_cast<uint16_t*>(keys() + kCollected); }
  __device__ __forceinline__ uint32_t* begins() const { return keys() + kCollected + kCollected / 2; }
  // Return the buffer of two chunks for the warp's copy number `at`.
  __device__ __forceinline__ float* slot(uint32_t at) const {
    return reinterpret_cast<float*>(begins() + 2 * kPairs) + (2 * cluster_row.warp() + (at & 1)) * 2 * kSumChunk;
  }
  // Return the buffer without a copy in flight, after pass() with `ahead` = 1, which fills only the other
  // buffer.
  __device__ __forceinline__ float* ready_buffer() const { return slot(pairs_read + 1); }
  __device__ __forceinline__ int chunk_of(int pair) const { return 2 * (first_pair + pair); }

  __device__ __forceinline__ static bool is_copied(const Source& source, int c) {
    return source.is_aligned && int64_t{c + 1} * kSumChunk <= source.n;
  }

  // Issue the copies of the warp's pair number `pair` as one cp.async group. The group is empty if there is
  // no row.
  __device__ __forceinline__ void copy(const Source& source, int pair, uint32_t at) const {
    if (source.data != nullptr && pair < own_pairs) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int c = chunk_of(pair) + second;
        if (!is_copied(source, c)) continue;
        const int size = size_of_row_type(source.dtype);
        const char* from = source.data + (int64_t{c} * kSumChunk + part_start(0)) * size;
        const uint32_t to = ptx::shared_address(slot(at) + second * kSumChunk) + part_start(0) * size;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (size == 4) {
            ptx::cp_async_16(to + j * 512, from + j * 512);
          } else {
            ptx::cp_async_8(to + j * 256, from + j * 256, true);
          }
        }
      }
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void start(const Source& source) const {
    copy(source, 0, pairs_read), copy(source, 1, pairs_read + 1);
  }

  template <typename T>
  __device__ __forceinline__ static void unpack(Chunk& x, const T* from) {
#pragma unroll
    for (int j = 0; j < 4; ++j) load_vec<T, 4>(from + part_start(j)).to_floats(x.at[j]);
  }
  __device__ __forceinline__ void fetch(Chunk& x, const Source& source, int c, const float* from, float padding) const {
    if (!is_copied(source, c)) {
      if (c < cluster_row.chunks) return source.load(x, int64_t{c} * kSumChunk, padding);
      return x.for_each([&](float& value) { value = padding; });
    }
    if (source.dtype == DType::kFloat32) return unpack(x, from);
    if (source.dtype == DType::kFloat16) return unpack(x, reinterpret_cast<const half_t*>(from));
    unpack(x, reinterpret_cast<const bfloat16_t*>(from));
  }
  __device__ __forceinline__ void fetch(Chunk& one, Chunk& other, const Source& source, int pair, uint32_t at,
                                        float padding) const {
    const float* from = slot(at);
    fetch(one, source, chunk_of(pair), from, padding);
    fetch(other, source, chunk_of(pair) + 1, from + kSumChunk, padding);
  }

  // Call f(first, second, pair) for the warp's pairs. The caller has issued the copies of the first two
  // pairs. This function also issues those of the first `ahead` pairs of `next`.
  template <typename F>
  __device__ __forceinline__ void pass(const Source& source, const Source& next, int ahead, float padding, const F& f) {
#pragma unroll 1
    for (int pair = 0; pair < own_pairs; ++pair) {
      ptx::cp_async_wait<1>();
      Chunk one, other;
      fetch(one, other, source, pair, pairs_read, padding);
      if (pair + 2 < own_pairs) {
        copy(source, pair + 2, pairs_read);
      } else {
        const int next_pair = pair + 2 - own_pairs;
        copy(next_pair < ahead ? next : Source{}, next_pair, pairs_read);
      }
      ++pairs_read;
      f(one, other, pair);
    }
  }

  // Store the sum of each chunk of a pair: lanes below 16 hold the first, the others the second.
  __device__ __forceinline__ void store_sums(float* to, int pair, float value) const {
    const int c = chunk_of(pair) + (lane_id() >> 4);
    if ((lane_id() & 15) == 0 && c < cluster_row.chunks) to[c] = value;
  }

  __device__ __forceinline__ void store(void* to, DType dtype, int64_t row, int pair, const Chunk& one,
                                        const Chunk& other) const {
    const int64_t at = int64_t{chunk_of(pair)} * kSumChunk;
    store_chunk(to, dtype, row, one, at, cluster_row.n);
    if (at + kSumChunk < cluster_row.n) store_chunk(to, dtype, row, other, at + kSumChunk, cluster_row.n);
  }

  // Sum the elements >= t by rereading the row, without copies.
  __device__ __forceinline__ void sum_again(const Source& source, float t) {
    cluster_row.sums_buffer ^= 1;
    __syncthreads();
#pragma unroll 1
    for (int pair = 0; pair < own_pairs; ++pair) {
      Chunk one, other;
      source.load(one, int64_t{chunk_of(pair)} * kSumChunk, 0.0f);
      source.load(other, int64_t{chunk_of(pair) + 1} * kSumChunk, 0.0f);
      store_sums(sums(), pair, pair_sum(one, other, [t](float x) { return x >= t ? max_nan(x, 0.0f) : 0.0f; }));
    }
    __syncthreads();
  }

  // Search the collected elements. A separate function limits registers.
  template <bool kBySum>
  __device__ __noinline__ static ThresholdKey search(ClusterSmemSearch x, uint32_t count, uint32_t low, uint32_t high,
                                                     uint64_t need, Weights weights) {
    return x.search_gathered<kBySum>({true, count, lane_id() == 0 ? count : 0}, low, high, need, weights);
  }

  // Reserved entries of a list, one per bit in `found`.
  struct Span {
    uint32_t at;    // the lane's first entry
    uint32_t base;  // the warp's first entry
    uint32_t all;   // number of the warp's entries
  };
  __device__ __forceinline__ static Span span_of(uint32_t found) {
    const uint32_t end = ptx::warp_inclusive_sum(__popc(found));
    const uint32_t all = __shfl_sync(kAllLanes, end, 31);
    uint32_t base = 0;
    if (lane_id() == 0 && all != 0) base = atomicAdd(&scratch().counter, all);
    base = __shfl_sync(kAllLanes, base, 0);
    return {base + end - __popc(found), base, all};
  }
};

// Call work(x, row, source, next source) for the CTA's rows.
template <typename F>
__device__ __forceinline__ void for_rows(const RowsOf& rows, int64_t count, int64_t n, const F& work) {
  const auto source_of = [&](int64_t row) { return row < count ? Source::of(rows, row * rows.stride, n) : Source{}; };
  PipelinedRow x = PipelinedRow::of(n);
  wait_for_inputs();
  launch_dependents();
  Source source = source_of(blockIdx.x);
  x.start(source);
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const Source next = source_of(row + gridDim.x);
    work(x, row, source, next);
    __syncthreads();
    source = next;
  }
}

}  // namespace flashinfer::cuda
