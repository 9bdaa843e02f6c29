// Elementary functions that variants may call on every backend: one instruction each on a GPU, branch-free
// code that compilers vectorise on a CPU.
//
// `m` and `l` of online softmax (Milakov and Gimelshein, arXiv 1805.02867) are the running maximum of the
// logits and the running sum of their exponentials. All kernels use base 2: P = 2^(S - m), l = sum of P.
#pragma once

#include <flashinfer/common/rows.h>

#include <cstdint>
#include <cstring>

namespace flashinfer::math {

constexpr float log2e = 1.44269504088896340736f;
constexpr float loge2 = 0.69314718055994530942f;
constexpr float inf = __builtin_huge_valf();

// condition ? yes : no, by bits. A compiler may make a branch of a conditional expression, and then does not
// vectorise the loop around it.
FLASHINFER_HD float select(bool condition, float yes, float no) {
  uint32_t yes_bits, no_bits;
  std::memcpy(&yes_bits, &yes, 4);
  std::memcpy(&no_bits, &no, 4);
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  no_bits = (yes_bits & mask) | (no_bits & ~mask);
  std::memcpy(&no, &no_bits, 4);
  return no;
}

// Return 2^x with an error of 2e-7: 0 below -126, infinity from 128 on.
FLASHINFER_HD float ptx_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // x = k + r with 0 <= r <= 1. The result is the best polynomial for 2^r, times a float with exponent k, or
  // with no bit set if k is too small.
  const float above = select(x < -126.5f, -126.5f, x), clamped = select(above > 128.0f, 128.0f, above);
  const float shifted = (clamped - 0.5f) + 0x1.8p23f, r = clamped - (shifted - 0x1.8p23f);
  float sum = 1.8671305698e-3f;
  sum = sum * r + 9.0170292533e-3f;
  sum = sum * r + 5.5799913880e-2f;
  sum = sum * r + 2.4016444994e-1f;
  sum = sum * r + 6.9315131182e-1f;
  sum = sum * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return sum * power;
#endif
}

// Return 1 / x.
FLASHINFER_HD float ptx_rcp(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// Return the smaller number, or NaN if x is NaN.
FLASHINFER_HD float min_or_nan(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x < y || x != x ? x : y;
#endif
}

// Return log2 x; -inf for 0.
FLASHINFER_HD float ptx_log2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_log2f(x);
#endif
}

// Return the hyperbolic tangent: to 2^-11 on a GPU, which has one instruction for it, to a few ulp of 1 on a
// CPU.
FLASHINFER_HD float tanh(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // (1 - e) / (1 + e) with e = exp(-2 |x|) loses digits near 0. The odd series is exact enough there.
  const float a = __builtin_fabsf(x), e = ptx_exp2(-2.0f * log2e * a), xx = x * x;
  const float large = (1.0f - e) / (1.0f + e);
  const float small =
      a * (1.0f + xx * (-0.333333333f + xx * (0.133333333f + xx * (-0.0539682540f + xx * 0.0218694885f))));
  return __builtin_copysignf(select(a < 0.25f, small, large), x);
#endif
}

}  // namespace flashinfer::math
