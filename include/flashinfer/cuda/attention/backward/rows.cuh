// The contents of p.memory, and two small kernels. One makes a BackwardRow per row before the gradients. The
// other adds the partial sums of dK and dV after them.
#pragma once

#include <cstdint>
#include <vector>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// p.memory holds a BackwardRow per row, and then the partial sums of dK and dV.
FLASHINFER_HD BackwardRow* rows_in_memory(const PrefillBackwardParams& p) {
  return reinterpret_cast<BackwardRow*>(p.memory);
}
FLASHINFER_HD int64_t floats_of_rows(const PrefillBackwardParams& p) {
  return (p.tokens * p.num_qo_heads + 31) / 32 * 64;
}

// Return partial number `part` of the sums of dK and dV: rows of dK, each followed by its row of dV.
__device__ __forceinline__ HeadRows sums_of(const PrefillBackwardParams& p, int32_t part) {
  const int64_t dim = p.head_dim_qk + p.head_dim_vo;
  return {p.sums + part * p.kv_tokens * p.num_kv_heads * dim, p.num_kv_heads * dim, dim};
}

constexpr int kRowLanes = 16, kRowThreads = 256;

// Write lse and delta = rowsum(dO * O) - dlse * log2 e of each row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    prefill_backward_rows_kernel(const __grid_constant__ PrefillBackwardParams p) {
  const int64_t at = int64_t{blockIdx.x} * (kRowThreads / kRowLanes) + threadIdx.x / kRowLanes;
  const int64_t row = min(at, p.tokens * p.num_qo_heads - 1);
  const T* out = p.out.at<const T>(row / p.num_qo_heads, row % p.num_qo_heads);
  const T* grad = p.grad.at<const T>(row / p.num_qo_heads, row % p.num_qo_heads);
  float sum = 0;
  for (int d = threadIdx.x % kRowLanes * 8; d < p.head_dim_vo; d += kRowLanes * 8) {
    float a[8], b[8];
    load_vec<T, 8>(out + d).to_floats(a), load_vec<T, 8>(grad + d).to_floats(b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
  }
  sum = lanes_sum<kRowLanes>(sum);
  if (threadIdx.x % kRowLanes != 0 || row != at) return;
  const float lse = p.lse[row];
  rows_in_memory(p)[row] = {lse == -math::inf ? math::inf : lse, sum - p.grad_lse[row] * math::log2e};
}

// Add the partial sums of dK and dV in their order, eight numbers of a row at a time.
template <typename T>
__global__ void prefill_backward_sum_kernel(const __grid_constant__ PrefillBackwardParams p, const int64_t tokens) {
  const int64_t dim = p.head_dim_qk + p.head_dim_vo, chunks = dim / 8;
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= tokens * p.num_kv_heads * chunks) return;
  const int64_t row = i / chunks;
  const int32_t chunk = static_cast<int32_t>(i % chunks) * 8, head = static_cast<int32_t>(row % p.num_kv_heads);
  float sums[8] = {};
  for (int part = 0; part < p.splits; ++part) {
    float partial[8];
    load_vec<float, 8>(sums_of(p, part).template at<const float>(row / p.num_kv_heads, head) + chunk)
        .to_floats(partial);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += partial[j];
  }
  const bool is_dk = chunk < p.head_dim_qk;
  T* to = (is_dk ? p.dk : p.dv).template at<T>(row / p.num_kv_heads, head) + chunk - (is_dk ? 0 : p.head_dim_qk);
  *reinterpret_cast<Vec<T, 8>*>(to) = Vec<T, 8>::from_floats(sums);
}

template <typename T>
void launch_sums(const PrefillBackwardParams& p, const std::vector<BackwardEntry>& entries, const Launch& where) {
  int64_t tokens = 0;
  for (const BackwardEntry& entry : entries) tokens += entry.kv_len;
  const int64_t threads = tokens * p.num_kv_heads * ((p.head_dim_qk + p.head_dim_vo) / 8);
  launch(prefill_backward_sum_kernel<T>, dim3(static_cast<unsigned>((threads + 255) / 256)), dim3(256),
         Launch{where.stream, where.device, 0}, p, tokens);
}

}  // namespace flashinfer::cuda
