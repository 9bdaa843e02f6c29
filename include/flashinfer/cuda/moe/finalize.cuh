// Sum over the experts of a token: the last step of a mixture of experts.
#pragma once

#include <cstdint>

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kFinalizeThreads = 128;

template <typename T, typename Out, int kN>
__global__ void __launch_bounds__(kFinalizeThreads) finalize_kernel(const FinalizeParams p) {
  wait_for_inputs();
  launch_dependents();
  const int64_t token = blockIdx.x, first = (int64_t{blockIdx.y} * kFinalizeThreads + threadIdx.x) * kN;
  for (int64_t at = first; at < p.size; at += int64_t{gridDim.y} * kFinalizeThreads * kN) {
    float total[kN] = {};
    for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
      const int32_t row = p.rows[slot];
      if (row < 0) continue;
      const float weight = p.weights ? p.weights[slot] : 1.f;
      const Vec<T, kN> in = load_vec<T, kN>(static_cast<const T*>(p.input) + row * p.input_stride + at);
      const float* bias = p.bias ? p.bias + p.expert(row) * p.size + at : nullptr;
#pragma unroll
      for (int i = 0; i < kN; ++i) total[i] += weight * (to_float(in.at[i]) + (bias ? bias[i] : 0.f));
    }
    Out* out = static_cast<Out*>(p.out) + token * p.out_stride + at;
    if constexpr (kN == 1) {
      *out = from_float<Out>(total[0]);
    } else {
      store_vec(out, Vec<Out, kN>::from_floats(total));
    }
  }
}

template <typename T, typename Out>
void finalize(const FinalizeParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / static_cast<int>(sizeof(T) > sizeof(Out) ? sizeof(T) : sizeof(Out));
  const bool fits =
      fits_vectors<T>({p.input}, p.input_stride, p.size) && fits_vectors<Out>({p.out}, p.out_stride, p.size);
  const int64_t step = int64_t{kFinalizeThreads} * (fits ? kN : 1), columns = (p.size + step - 1) / step;
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(columns < 65535 ? columns : 65535));
  launch(fits ? finalize_kernel<T, Out, kN> : finalize_kernel<T, Out, 1>, grid, kFinalizeThreads, where, p);
}

template <typename T>
void finalize(const FinalizeParams& p, const Launch& where) {
  if (p.out_dtype == DType::kFloat32) return finalize<T, float>(p, where);
  if (p.out_dtype == DType::kFloat16) return finalize<T, half_t>(p, where);
  finalize<T, bfloat16_t>(p, where);
}

}  // namespace flashinfer::cuda
