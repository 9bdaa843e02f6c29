// Conversion of floats to 8-bit numbers. Separate from convert.cuh, because few kernels need it and its CUDA
// header is long.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include <flashinfer/common/dtype.h>

namespace flashinfer::cuda {

// Returns eight bits of a float: rounded to nearest, ties to even, clamped to the finite range. NaN stays
// NaN, or becomes the integer 0.
__device__ __forceinline__ uint8_t quantize(float value, DType dtype) {
  if (dtype == DType::kInt8) return static_cast<uint8_t>(max(-128, min(127, __float2int_rn(value))));
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, dtype == DType::kFloat8E5M2 ? __NV_E5M2 : __NV_E4M3);
}

}  // namespace flashinfer::cuda
