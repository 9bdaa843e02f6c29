// Numbers of eight bits: what a cache may hold. Kernels widen them, exactly, to the 16-bit type of the queries.
#pragma once

#include <cstdint>
#include <cstring>

#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer {

struct fp8_e4m3_t {
  uint8_t bits;
};
struct fp8_e5m2_t {
  uint8_t bits;
};

namespace cuda {

// The two numbers of the low 16 bits as a pair of half_t, the first in the low half.
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
  // The exponent's bias is 7 and a half's is 15: the bits in place are a half that is 2^8 times too small.
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

// The two numbers of the low 16 bits as a pair of T.
template <typename T, typename From>
__device__ __forceinline__ uint32_t widen(uint32_t two) {
  const uint32_t halves = widen_to_half<From>(two);
  if constexpr (sizeof(T) == sizeof(half_t) && !__is_same(T, bfloat16_t)) {
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

}  // namespace cuda
}  // namespace flashinfer
