// RMSNorm with a quantised 8-bit result on CUDA, by the kernels of norm.cuh.
#pragma once

#include <flashinfer/common/norm_quant.h>
#include <flashinfer/cuda/norm.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>

namespace flashinfer::cuda {

template <typename T>
struct RmsNormQuantOutput {
  using Params = RmsNormQuantParams;
  using Element = uint8_t;
  float rcp_scale;
  DType dtype;

  __device__ explicit RmsNormQuantOutput(const Params& p)
      : rcp_scale(static_cast<float>(p.rcp_scale())), dtype(p.output_dtype) {}
  template <int kN>
  __device__ __forceinline__ Vec<Element, kN> operator()(const float (&x)[kN], ScaleOf<T> scale,
                                                         const float (&weights)[kN]) const {
    Vec<Element, kN> result;
#pragma unroll
    for (int j = 0; j < kN; ++j) result.at[j] = quantize(x[j] * scale * weights[j] * rcp_scale, dtype);
    return result;
  }
};

template <typename T>
void rms_norm_quant(const RmsNormQuantParams& p, const Launch& where) {
  rms_norm<T, RmsNormQuantOutput<T>>(p, where);
}

}  // namespace flashinfer::cuda
