// Two small kernels around the Hopper kernel of attention's gradients: one computes lse and delta by tiles,
// the other converts sums of dQ from register order.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/common/search.h>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/attention/backward/sm90/shape.cuh>
#include <flashinfer/cuda/attention/backward/sm90/work.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda::sm90 {

constexpr int kBackwardRowThreads = 256;

// Return the request of a tile of queries. `tile` becomes its number in the request.
__device__ __forceinline__ const BackwardEntry& find_queries(const BackwardTable& table, int32_t& tile) {
  const BackwardEntry& found =
      table.at[last_at_or_before(0, table.count, tile, [&](int i) { return table.at[i].first_query_tile; })];
  tile -= found.first_query_tile;
  return found;
}

// One CTA per tile of queries, from first_query_tile on, and head.
template <typename S>
__global__ void __launch_bounds__(kBackwardRowThreads)
    backward_rows_kernel(const __grid_constant__ PrefillBackwardParams p, const __grid_constant__ BackwardTable table,
                         const BackwardMemory memory, const int32_t first_query_tile, const int32_t tiles) {
  using T = typename S::T;
  constexpr int kLanes = S::kDim / 8, kAtOnce = kBackwardRowThreads / kLanes;
  const auto head = static_cast<int32_t>(blockIdx.y);
  if (threadIdx.x == 0 && blockIdx.x == 0 && head == 0) *memory.next_work = 0;
  auto tile = static_cast<int32_t>(blockIdx.x) + first_query_tile;
  if (static_cast<int32_t>(blockIdx.x) >= tiles) return;
  const int64_t number = memory.number(head, tile);
  const BackwardEntry& entry = find_queries(table, tile);
  if (threadIdx.x == 0) memory.added[number] = 0;
  float* to = memory.rows + number * (2 * S::kQueries);
  for (int i = threadIdx.x / kLanes; i < S::kQueries; i += kAtOnce) {
    const int32_t row = tile * S::kQueries + i;
    const bool exists = row < entry.qo_len;
    const int64_t token = int64_t{entry.qo_start} + row;
    float sum = 0;
    if (exists) {
      float a[8], b[8];
      load_vec<T, 8>(p.out.at<const T>(token, head) + threadIdx.x % kLanes * 8).to_floats(a);
      load_vec<T, 8>(p.grad.at<const T>(token, head) + threadIdx.x % kLanes * 8).to_floats(b);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += a[j] * b[j];
    }
    sum = lanes_sum<kLanes>(sum);
    if (threadIdx.x % kLanes != 0) continue;
    const int64_t at = token * p.num_qo_heads + head;
    const float lse = exists ? p.lse[at] : -math::inf;
    to[i] = lse == -math::inf ? math::inf : lse;
    to[S::kQueries + i] = exists ? sum - p.grad_lse[at] * math::log2e : 0.0f;
  }
}

// One CTA per tile of queries and head. A thread converts eight columns of two rows, 64 bytes, at a time.
template <typename S>
__global__ void __launch_bounds__(kBackwardRowThreads)
    backward_queries_kernel(const __grid_constant__ PrefillBackwardParams p,
                            const __grid_constant__ BackwardTable table, const BackwardMemory memory,
                            const int32_t first_query_tile) {
  using T = typename S::T;
  const auto head = static_cast<int32_t>(blockIdx.y);
  auto tile = static_cast<int32_t>(blockIdx.x) + first_query_tile;
  const float* from = memory.sums + memory.number(head, tile) * (S::kSumBytes / 4);
  const BackwardEntry& entry = find_queries(table, tile);
  const BackwardMask mask(p, entry);
  int32_t begin, end;
  mask.columns<false>(tile * S::kQueries, min((tile + 1) * S::kQueries, entry.qo_len) - 1, begin, end);
#pragma unroll
  for (int i = threadIdx.x; i < S::kSumBytes / 64; i += kBackwardRowThreads) {
    const int columns = i % 8, quad = i / 8 % 32, group = i / 256;  // a quad of a warpgroup has rows g and g + 8
    float4 quarter[4] = {};
    if (begin < end) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        quarter[j] = *reinterpret_cast<const float4*>(from + group * 4096 + columns * 512 + quad * 16 + j * 4);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_group = quad / 8 * 16 + quad % 8 + 8 * half;
      const int32_t row = tile * S::kQueries + in_group + (S::kChunks == 1 ? 64 * group : 0);
      if (row >= entry.qo_len) continue;
      float values[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[2 * j] = (half ? quarter[j].z : quarter[j].x) * p.sm_scale;
        values[2 * j + 1] = (half ? quarter[j].w : quarter[j].y) * p.sm_scale;
      }
      T* to = p.dq.at<T>(int64_t{entry.qo_start} + row, head) + columns * 8 + (S::kChunks == 1 ? 0 : 64 * group);
      *reinterpret_cast<Vec<T, 8>*>(to) = Vec<T, 8>::from_floats(values);
    }
  }
}

}  // namespace flashinfer::cuda::sm90
