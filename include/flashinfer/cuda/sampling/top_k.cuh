// The k largest elements of rows of any sign: masks of all others, and the k elements with their indices.
#pragma once

#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

// Start a row and return the key of its k-th largest element, or 0 if k covers the row.
template <bool kResident>
__device__ __forceinline__ uint32_t kth_largest_key(ClusterRow<kResident>& cluster_row, const RowsOf& rows, int64_t row,
                                                    TopK top_k) {
  const Source source = Source::of(rows, row * rows.stride, cluster_row.n);
  set_scratch([&](Scratch& s) { s.source = source, s.remap = {}, s.remap.is_raw = true; });
  if constexpr (kResident) cluster_row.template read_maxima<false>();
  return top_k.on ? top_k_key<Signed>(cluster_row, top_k.k) : 0;
}

template <bool kResident>
__global__ void __launch_bounds__(512, 1) mask_kernel(const __grid_constant__ MapRowsParams p) {
  ClusterRow<kResident> cluster_row = ClusterRow<kResident>::of(p.vocab_size);
  const int64_t row = blockIdx.x / cluster_row.size;
  cluster_row.start();
  wait_for_inputs();
  launch_dependents();
  const float least = Signed::real(
      kth_largest_key(cluster_row, p.input, row, top_k_of(p.parameter.get_integer(row, row), p.vocab_size)));
  cluster_row.for_own_chunks([&](int c) {
    Chunk chunk;
    cluster_row.load(chunk, c);
    chunk.for_each([&](float& x) { x = x < least ? -INFINITY : x; });
    store_chunk(p.output, p.input.dtype, row, chunk, int64_t{c} * kSumChunk, p.vocab_size);
  });
  cluster_row.sync_reads();
}

// Count the elements of a chunk above the threshold (upper half of a word) and at it (lower half).
__device__ __forceinline__ uint32_t counts_of(const Chunk& chunk, uint32_t key, int64_t left, uint32_t (&part)[4]) {
  uint32_t all = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    part[j] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t own = Signed::key(chunk.at[j][i]);
      if (part_start(j) + i < left) part[j] += own > key ? 1u << 16 : own == key ? 1u : 0u;
    }
    all += part[j];
  }
  return all;
}

template <bool kResident>
__global__ void __launch_bounds__(512, 1) top_k_kernel(const __grid_constant__ TopKParams p) {
  ClusterRow<kResident> cluster_row = ClusterRow<kResident>::of(p.vocab_size);
  const int64_t row = blockIdx.x / cluster_row.size;
  cluster_row.start();
  wait_for_inputs();
  launch_dependents();
  const uint32_t key = kth_largest_key(cluster_row, p.input, row, {p.k < p.vocab_size, p.k});
  cluster_row.sums_buffer ^= 1;
  cluster_row.begin_pass(cluster_row.chunks);
  const char* from = scratch().source.data;
  uint32_t part[4];
  cluster_row.for_own_chunks([&](int c) {
    Chunk chunk;
    cluster_row.load(chunk, c);
    const uint32_t counts = counts_of(chunk, key, p.vocab_size - int64_t{c} * kSumChunk, part);
    cluster_row.broadcast(cluster_row.sums() + c, __uint_as_float(__reduce_add_sync(kAllLanes, counts)));
  });
  cluster_row.end_pass(), ++cluster_row.pass;
  uint64_t above = 0;
  for (int c = lane_id(); c < cluster_row.chunks; c += 32) above += __float_as_uint(cluster_row.sums()[c]) >> 16;
  const int64_t ties = p.k - static_cast<int64_t>(lanes_sum<32>(above));
  cluster_row.for_own_chunks([&](int c) {
    uint64_t higher = 0, equal = 0;
    for (int i = lane_id(); i < c; i += 32) {
      const uint32_t counts = __float_as_uint(cluster_row.sums()[i]);
      higher += counts >> 16, equal += counts & 0xffff;
    }
    higher = lanes_sum<32>(higher), equal = lanes_sum<32>(equal);
    Chunk chunk;
    cluster_row.load(chunk, c);
    const int64_t left = p.vocab_size - int64_t{c} * kSumChunk;
    counts_of(chunk, key, left, part);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t end = part[j];
#pragma unroll
      for (int apart = 1; apart < 32; apart *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, end, apart);
        if (lane_id() >= apart) end += other;
      }
      int64_t rank = higher + ((end - part[j]) >> 16), tie = equal + ((end - part[j]) & 0xffff);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t own = Signed::key(chunk.at[j][i]);
        if (part_start(j) + i >= left || own < key) continue;
        if (own > key || tie < ties) {
          const int64_t at = row * p.k + rank + min(tie, ties), index = int64_t{c} * kSumChunk + part_start(j) + i;
          p.indices[at] = index;
          const int size = size_of_row_type(p.input.dtype);
          memcpy(static_cast<char*>(p.values) + at * size, from + index * size, size);
        }
        own > key ? ++rank : ++tie;
      }
      const uint32_t all = __shfl_sync(kAllLanes, end, 31);
      higher += all >> 16, equal += all & 0xffff;
    }
  });
  cluster_row.sync_reads();
}

}  // namespace flashinfer::cuda
