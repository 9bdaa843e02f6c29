// Write a warp's sums to gradients.
#pragma once

#include <cstdint>

#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/rows.cuh>
#include <flashinfer/cuda/attention/backward/shape.cuh>
#include <flashinfer/cuda/attention/backward/tile.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>

namespace flashinfer::cuda {

// Write a warp's sums as rows of a gradient, of T, or of float if several CTAs share a tile.
template <typename T, int kColumns>
__device__ __forceinline__ void write_rows(const HeadRows& to, int64_t token, int32_t head, int32_t rows, int32_t dim,
                                           int first_column, const Accumulator<32, kColumns>& sums, float scale) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * m + 8 * half + lane / 4;
      if (row >= rows) continue;
      T* at = to.at<T>(token + row, head) + first_column + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if (first_column + 8 * n >= dim) continue;
        const float a = sums[m][n][2 * half] * scale, b = sums[m][n][2 * half + 1] * scale;
        if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float2*>(at + 8 * n) = float2{a, b};
        } else {
          *reinterpret_cast<uint32_t*>(at + 8 * n) = pack<T>(a, b);
        }
      }
    }
  }
}

template <typename S>
__device__ __forceinline__ void write_gradients(const PrefillBackwardParams& p, const BackwardEntry& entry,
                                                const BackwardWarp<S>& warp, int32_t row, int32_t head, int32_t part) {
  using T = typename S::T;
  const int64_t token = int64_t{S::kOfKeys ? entry.kv_start : entry.qo_start} + row;
  const int32_t rows = (S::kOfKeys ? entry.kv_len : entry.qo_len) - row;
  const int qk = warp.split * S::kTilesQK * 8, vo = warp.split * S::kTilesVO * 8;
  if constexpr (!S::kOfKeys) {
    write_rows<T>(p.dq, token, head, rows, p.head_dim_qk, qk, warp.grad_qk, p.sm_scale);
  } else if (p.splits == 1) {
    write_rows<T>(p.dk, token, head, rows, p.head_dim_qk, qk, warp.grad_qk, p.sm_scale);
    write_rows<T>(p.dv, token, head, rows, p.head_dim_vo, vo, warp.grad_vo, 1.0f);
  } else {
    HeadRows to = sums_of(p, part);
    write_rows<float>(to, token, head, rows, p.head_dim_qk, qk, warp.grad_qk, p.sm_scale);
    to.data = static_cast<float*>(to.data) + p.head_dim_qk;
    write_rows<float>(to, token, head, rows, p.head_dim_vo, vo, warp.grad_vo, 1.0f);
  }
}

}  // namespace flashinfer::cuda
