// RMSNorm with a quantised result on CUDA: as rms_norm, a row lies in registers between the sum and the result.
#pragma once

#include <cuda_fp8.h>

#include <flashinfer/common/norm_quant.h>
#include <flashinfer/cuda/norm.cuh>

namespace flashinfer::cuda {

// Eight bits of a float: rounded to nearest, ties to even, clamped to the finite numbers; NaN stays NaN, as an integer
// 0.
__device__ __forceinline__ uint8_t quantize(float value, DType dtype) {
  if (dtype == DType::kInt8) return static_cast<uint8_t>(max(-128, min(127, __float2int_rn(value))));
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3);
}

template <typename T, bool kWithResidual>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_quant_kernel(const RmsNormQuantParams p) {
  constexpr int kN = kVecBytes / sizeof(T), kVecs = kVecsPerThread;
  using V = Vec<T, kN>;
  __shared__ __align__(16) float partial[32 * 32];
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool active = row < p.num_rows;
  const int num_vecs = active ? p.hidden_size / kN : 0;
  const T* in = static_cast<const T*>(p.input) + (active ? p.input_rows.offset(row) : 0);
  T* res = kWithResidual ? static_cast<T*>(p.residual) + (active ? p.residual_rows.offset(row) : 0) : nullptr;
  uint8_t* out = static_cast<uint8_t*>(p.output) + (active ? p.output_rows.offset(row) : 0);
  const T* weight = static_cast<const T*>(p.weight);

  wait_for_inputs();
  let_next_start();
  V x[kVecs];
  float kept[kWithResidual ? kVecs : 1][kN];  // the sum of input and residual, not yet rounded
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec < num_vecs) x[i] = load_vec<T, kN>(in + vec * kN);
  }
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float values[kN];
    x[i].to_floats(values);
    if constexpr (kWithResidual) {
      float other[kN];
      load_vec<T, kN>(res + vec * kN).to_floats(other);
#pragma unroll
      for (int j = 0; j < kN; ++j) kept[i][j] = values[j] = values[j] + other[j];
      store_vec(res + vec * kN, V::from_floats(values));
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) squares += values[j] * values[j];
  }
  const float scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const auto rcp_scale = static_cast<float>(p.rcp_scale());
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int vec = threadIdx.x + i * blockDim.x;
    if (vec >= num_vecs) continue;
    float values[kN], weights[kN];
    load_vec<T, kN>(weight + vec * kN).to_floats(weights);
    if constexpr (!kWithResidual) x[i].to_floats(values);
    Vec<uint8_t, kN> result;
#pragma unroll
    for (int j = 0; j < kN; ++j)
      result.at[j] =
          quantize((kWithResidual ? kept[i][j] : values[j]) * scale * weights[j] * rcp_scale, p.output_dtype);
    store_vec(out + vec * kN, result);
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_quant_any_kernel(const RmsNormQuantParams p) {
  __shared__ __align__(16) float partial[32];
  const int64_t row = blockIdx.x;
  const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
  T* res = p.residual ? static_cast<T*>(p.residual) + p.residual_rows.offset(row) : nullptr;
  uint8_t* out = static_cast<uint8_t*>(p.output) + p.output_rows.offset(row);
  const T* weight = static_cast<const T*>(p.weight);

  wait_for_inputs();
  let_next_start();
  float squares = 0;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    const float x = to_float(in[i]) + (res ? to_float(res[i]) : 0.0f);
    squares += x * x;
  }
  const float scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const auto rcp_scale = static_cast<float>(p.rcp_scale());
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    float x = to_float(in[i]);
    if (res) {
      x += to_float(res[i]);
      res[i] = from_float<T>(x);
    }
    out[i] = quantize(x * scale * to_float(weight[i]) * rcp_scale, p.output_dtype);
  }
}

// A vector of inputs is one of outputs, of kVecBytes / sizeof(T) bytes: strides that keep the one aligned keep both.
template <typename T>
void rms_norm_quant(const RmsNormQuantParams& p, const Launch& where) {
  launch_rows<T>(p.residual ? rms_norm_quant_kernel<T, true> : rms_norm_quant_kernel<T, false>, nullptr,
                 rms_norm_quant_any_kernel<T>, p, where, {p.input, p.residual, p.weight, p.output}, p.input_rows,
                 p.residual_rows, p.output_rows);
}

}  // namespace flashinfer::cuda
