// Conversions of element types: to and from float, pairs in a register, and the exact widening of 8-bit
// numbers of a cache.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include <flashinfer/common/dtype.h>

namespace flashinfer::cuda {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(half_t value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bfloat16_t value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ half_t from_float<half_t>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ bfloat16_t from_float<bfloat16_t>(float value) {
  return __float2bfloat16_rn(value);
}

template <typename T>
constexpr bool kIsHalfType = __is_same(T, half_t) || __is_same(T, bfloat16_t);

// Pack two floats as two T in a register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(kIsHalfType<T>, "a register holds a pair of half_t or of bfloat16_t");
  uint32_t result;
  if constexpr (__is_same(T, bfloat16_t)) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&result, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&result, &pair, 4);
  }
  return result;
}

// Pack two floats. Numbers too large for half_t become its largest one.
template <typename T>
__device__ __forceinline__ uint32_t pack_finite(float low, float high) {
  uint32_t result = pack<T>(low, high);
  if constexpr (__is_same(T, half_t)) {
    __half2 pair;
    memcpy(&pair, &result, 4);
    const __half2 largest = __half2half2(__ushort_as_half(0x7bff));
    pair = __hmin2_nan(__hmax2_nan(pair, __hneg2(largest)), largest);
    memcpy(&result, &pair, 4);
  }
  return result;
}

template <typename T>
__device__ __forceinline__ void unpack(uint32_t pair, float& low, float& high) {
  static_assert(kIsHalfType<T>, "a register holds a pair of half_t or of bfloat16_t");
  T both[2];
  memcpy(both, &pair, 4);
  low = to_float(both[0]), high = to_float(both[1]);
}

// Pack four floats as four e4m3, the first in the low byte. Larger numbers become 448. GPUs before 8.9 have
// no such instruction: a kernel that reaches this there traps.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t result;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(result)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
#else
  __trap();
  return 0;
#endif
}

// Return the two numbers of the low 16 bits as a pair of half_t, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t widen_to_half(uint32_t two);

template <>
__device__ __forceinline__ uint32_t widen_to_half<fp8_e5m2_t>(uint32_t two) {
  return __byte_perm(two, 0, 0x1404);  // an e5m2 is the high byte of a half
}

template <>
__device__ __forceinline__ uint32_t widen_to_half<fp8_e4m3_t>(uint32_t two) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two)));
  return pair;
#else
  // The exponent's bias is 7, a half's is 15: the shifted bits are a half that is 2^8 times too small.
  const uint32_t high = __byte_perm(two, 0, 0x1404), magnitude = high & 0x7f007f00;
  const uint32_t bits = (high & 0x80008000) | magnitude >> 1;
  __half2 pair;
  memcpy(&pair, &bits, 4);
  pair = __hmul2(pair, __float2half2_rn(256.0f));
  uint32_t result;
  memcpy(&result, &pair, 4);
  return result | __vcmpeq2(magnitude, 0x7f007f00) & 0x7fff7fff;  // all ones are NaN
#endif
}

// Return the two numbers of the low 16 bits as a pair of T.
template <typename T, typename From>
__device__ __forceinline__ uint32_t widen(uint32_t two) {
  static_assert(kIsHalfType<T> && sizeof(From) == 1, "numbers of eight bits become half_t or bfloat16_t");
  const uint32_t halves = widen_to_half<From>(two);
  if constexpr (__is_same(T, half_t)) {
    return halves;
  } else {
    __half2 pair;
    memcpy(&pair, &halves, 4);
    const __nv_bfloat162 wide = __floats2bfloat162_rn(__low2float(pair), __high2float(pair));
    uint32_t result;
    memcpy(&result, &wide, 4);
    return result;
  }
}

// Return the products of the two numbers and a factor as a pair of T.
template <typename T, typename From>
__device__ __forceinline__ uint32_t widen_scaled(uint32_t two, float scale) {
  const uint32_t halves = widen_to_half<From>(two);
  __half2 pair;
  memcpy(&pair, &halves, 4);
  return pack<T>(__low2float(pair) * scale, __high2float(pair) * scale);
}

}  // namespace flashinfer::cuda
