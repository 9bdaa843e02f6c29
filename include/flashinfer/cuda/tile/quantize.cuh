// Conversion of floats to 8-bit numbers. Separate from convert.cuh, because few kernels need it and its CUDA
// header is long.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// Round two floats to T. One instruction converts both, and a lone conversion takes four times as long on
// 9.0.
template <typename T>
__device__ __forceinline__ void round_pair(float& a, float& b) {
  if constexpr (kIsHalfType<T>) unpack<T>(pack<T>(a, b), a, b);
}

template <typename T, int kN>
__device__ __forceinline__ void round_all(float (&x)[kN]) {
#pragma unroll
  for (int i = 0; i + 1 < kN; i += 2) round_pair<T>(x[i], x[i + 1]);
  if constexpr (kN == 1) x[0] = to_float(from_float<T>(x[0]));
}

// Return eight bits of a float, for GPUs before 8.9, whose instructions cuda_fp8.h replaces by long code in
// double. kMinExponent: the exponent field of the smallest normal number of the format, as a float.
template <int kMantissa, uint32_t kMinExponent>
__device__ __forceinline__ uint8_t fp8_by_integers(float value, float largest) {
  const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
  const float magnitude = fminf(fabsf(value), largest);
  const uint32_t exponent = max(__float_as_uint(magnitude) >> 23, kMinExponent);
  // Adding a power of two whose last bit is the result's last bit makes the hardware round to it.
  const uint32_t anchor = (exponent + (23 - kMantissa)) << 23;
  const uint32_t rounded = __float_as_uint(__fadd_rn(magnitude, __uint_as_float(anchor))) - anchor;
  return sign | (value != value ? 0x7fu : ((exponent - kMinExponent) << kMantissa) + rounded);
}

// Return eight bits of each float: rounded to nearest, ties to even, clamped to the finite range. NaN stays
// NaN, or becomes the integer 0. The dtype is the same for all threads: its branch is outside the loop.
template <int kN>
__device__ __forceinline__ Vec<uint8_t, kN> quantize(const float (&x)[kN], DType dtype) {
  Vec<uint8_t, kN> result;
  if (dtype == DType::kInt8) {
#pragma unroll
    for (int i = 0; i < kN; ++i) result.at[i] = static_cast<uint8_t>(max(-128, min(127, __float2int_rn(x[i]))));
    return result;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  const bool wide = dtype == DType::kFloat8E5M2;
#pragma unroll
  for (int i = 0; i < kN; ++i)
    result.at[i] = wide ? fp8_by_integers<2, 113>(x[i], 57344.0f) : fp8_by_integers<3, 121>(x[i], 448.0f);
#else
  const auto convert = [&](__nv_fp8_interpretation_t format) {
    if constexpr (kN == 1) {
      result.at[0] = __nv_cvt_float_to_fp8(x[0], __NV_SATFINITE, format);
    } else {
#pragma unroll
      for (int i = 0; i < kN; i += 2) {
        const uint16_t two = __nv_cvt_float2_to_fp8x2({x[i], x[i + 1]}, __NV_SATFINITE, format);
        result.at[i] = two & 0xff, result.at[i + 1] = two >> 8;
      }
    }
  };
  if (dtype == DType::kFloat8E5M2)
    convert(__NV_E5M2);
  else
    convert(__NV_E4M3);
#endif
  return result;
}

}  // namespace flashinfer::cuda
