// Elementary functions that variants may call on every backend: one instruction each on a GPU, branch-free code that a
// compiler turns into vectors on a CPU.
#pragma once

#include <flashinfer/common/rows.h>

#include <cstdint>
#include <cstring>

namespace flashinfer::math {

constexpr float log2e = 1.44269504088896340736f;
constexpr float loge2 = 0.69314718055994530942f;
constexpr float inf = __builtin_huge_valf();

// 2^x, to about 2 ulp; 0 below -125, infinity from 128 on.
FLASHINFER_HD float ptx_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // x = k + r with |r| <= 1/2; 2^r = e^(r ln 2) by its series, 2^k by adding k to the exponent.
  const float clamped = x < -125.0f ? -125.0f : x > 128.0f ? 128.0f : x;
  const float shifted = clamped + 0x1.8p23f, k = shifted - 0x1.8p23f;
  const float r = clamped - k;
  float sum = 1.5252733804e-5f;
  sum = sum * r + 1.5403530394e-4f;
  sum = sum * r + 1.3333558146e-3f;
  sum = sum * r + 9.6181291076e-3f;
  sum = sum * r + 5.5504108665e-2f;
  sum = sum * r + 2.4022650696e-1f;
  sum = sum * r + 6.9314718056e-1f;
  sum = sum * r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &sum, 4);
  bits += (static_cast<int32_t>(k) - 1) << 23;  // half of it, so that 2^128 is no exponent of its own
  std::memcpy(&sum, &bits, 4);
  return x < -125.0f ? 0.0f : x != x ? x : sum * 2.0f;
#endif
}

// 1 / x
FLASHINFER_HD float ptx_rcp(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// log2 x; -inf at 0.
FLASHINFER_HD float ptx_log2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return __builtin_log2f(x);
#endif
}

// Hyperbolic tangent: to 2^-11 on a GPU, where it is one instruction, and to a few ulp of 1 on a CPU.
FLASHINFER_HD float tanh(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // (1 - e) / (1 + e) with e = exp(-2 |x|) loses digits near 0, where the odd series is exact enough.
  const float a = x < 0 ? -x : x, e = ptx_exp2(-2.0f * log2e * a), xx = x * x;
  const float large = (1.0f - e) / (1.0f + e);
  const float small =
      a * (1.0f + xx * (-0.333333333f + xx * (0.133333333f + xx * (-0.0539682540f + xx * 0.0218694885f))));
  const float y = a < 0.25f ? small : large;
  return x < 0 ? -y : y;
#endif
}

}  // namespace flashinfer::math
