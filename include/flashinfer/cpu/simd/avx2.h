// AVX2 with F16C: conversions of kLanes elements, and the maximum of two.
#pragma once

#include <flashinfer/cpu/simd/convert.h>

#if defined(FLASHINFER_AVX2)
#include <immintrin.h>

namespace flashinfer::cpu {

inline vfloat load(const bfloat16_t* from) {
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_raw<__m128i>(from)), 16);
}
inline vfloat load(const half_t* from) { return (vfloat)_mm256_cvtph_ps(load_raw<__m128i>(from)); }
inline vfloat load(const fp8_e5m2_t* from) {
  return (vfloat)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8));
}
inline vfloat load(const fp8_e4m3_t* from) {
  // The sign is extended into the bit above the exponent, and that copy is masked out.
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)), 7);
  const vfloat value = (vfloat)_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(-0x4001))) * 256.0f;
  const vuint bits = bit_cast<vuint>(value), is_nan = bit_cast<vuint>((bits & 0x7fffffffu) == 0x43f00000u);  // 480
  return bit_cast<vfloat>(bits | is_nan >> 1);
}

inline void store(bfloat16_t* to, vfloat value) {
  const vuint rounded = bfloat16_bits(value);
  const __m256i packed = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
  const __m128i result = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  std::memcpy(to, &result, sizeof(result));
}
inline void store(half_t* to, vfloat value) {
  const __m128i result = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &result, sizeof(result));
}

// Return b if either is NaN. GCC 12 compiles portable.h's conditional expression to a comparison and a
// blend.
inline vfloat max(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }

inline Wide widen(vfloat value) {
  return {(vdouble)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)value)),
          (vdouble)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)value, 1))};
}
inline vfloat narrow(Wide value) {
  return (vfloat)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)value.high), _mm256_cvtpd_ps((__m256d)value.low));
}
inline vdouble load_wide(const float* from) { return (vdouble)_mm256_cvtps_pd(_mm_loadu_ps(from)); }
inline void store_narrow(float* to, vdouble value) { _mm_storeu_ps(to, _mm256_cvtpd_ps((__m256d)value)); }

}  // namespace flashinfer::cpu
#endif
