// AVX-512: conversions of kLanes elements, the maximum of two, powers of two.
#pragma once

#include <flashinfer/cpu/simd/convert.h>

#if defined(FLASHINFER_AVX512)
#include <immintrin.h>

namespace flashinfer::cpu {

// GCC 12 warns that the unmasked forms of its own headers use an uninitialised value (bug 105593).
constexpr __mmask16 kAllLanes = 0xffff;
constexpr __mmask8 kAllWideLanes = 0xff;

inline vfloat load(const bfloat16_t* from) {
  return (vfloat)_mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtepu16_epi32(kAllLanes, load_raw<__m256i>(from)),
                                         16);
}
inline vfloat load(const half_t* from) { return (vfloat)_mm512_maskz_cvtph_ps(kAllLanes, load_raw<__m256i>(from)); }
inline vfloat load(const fp8_e5m2_t* from) {
  return (vfloat)_mm512_maskz_cvtph_ps(kAllLanes, _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_raw<__m128i>(from)), 8));
}
inline vfloat load(const fp8_e4m3_t* from) {
  // The sign is extended into the bit above the exponent, and that copy is masked out.
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_raw<__m128i>(from)), 7);
  const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(-0x4001));
  const vfloat value = (vfloat)_mm512_maskz_cvtph_ps(kAllLanes, halves) * 256.0f;
  const vuint bits = bit_cast<vuint>(value), is_nan = bit_cast<vuint>((bits & 0x7fffffffu) == 0x43f00000u);  // 480
  return bit_cast<vfloat>(bits | is_nan >> 1);
}

// Rounds to bfloat16 in the upper half of each element's 32 bits.
inline __m512i rounded_to_bfloat16(vfloat value) {
  const __m512i bits = (__m512i)value;
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
}
inline void store(bfloat16_t* to, vfloat value) {
  const __m512i upper_halves = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21,
                                                19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i result = _mm512_permutexvar_epi16(upper_halves, rounded_to_bfloat16(value));
  std::memcpy(to, &result, sizeof(result) / 2);
}
inline void store(half_t* to, vfloat value) {
  const __m256i result = _mm512_maskz_cvtps_ph(kAllLanes, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &result, sizeof(result));
}

// Load the even elements, then the odd ones: half the conversions.
inline Two load_two(const bfloat16_t* from) {
  const __m512i both = load_raw<__m512i>(from);
  return {(vfloat)_mm512_slli_epi32(both, 16), (vfloat)_mm512_and_si512(both, _mm512_set1_epi32(-0x10000))};
}
inline void store_two(bfloat16_t* to, Two values) {
  const __m512i even = _mm512_srli_epi32(rounded_to_bfloat16(values.first), 16);
  const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaau, even, rounded_to_bfloat16(values.second));
  std::memcpy(to, &both, sizeof(both));
}

// Return b if either is NaN. GCC 12 compiles portable.h's conditional expression to a comparison and a
// blend.
inline vfloat max(vfloat a, vfloat b) { return (vfloat)_mm512_maskz_max_ps(kAllLanes, (__m512)a, (__m512)b); }

inline Wide widen(vfloat value) {
  const __m512d both = (__m512d)value;
  return {(vdouble)_mm512_maskz_cvtps_pd(kAllWideLanes, (__m256)_mm512_maskz_extractf64x4_pd(kAllWideLanes, both, 0)),
          (vdouble)_mm512_maskz_cvtps_pd(kAllWideLanes, (__m256)_mm512_maskz_extractf64x4_pd(kAllWideLanes, both, 1))};
}
inline vfloat narrow(Wide value) {
  const __m256d low = (__m256d)_mm512_maskz_cvtpd_ps(kAllWideLanes, (__m512d)value.low);
  const __m256d high = (__m256d)_mm512_maskz_cvtpd_ps(kAllWideLanes, (__m512d)value.high);
  return (vfloat)_mm512_maskz_insertf64x4(kAllWideLanes, _mm512_castpd256_pd512(low), high, 1);
}
inline vdouble load_wide(const float* from) {
  return (vdouble)_mm512_maskz_cvtps_pd(kAllWideLanes, _mm256_loadu_ps(from));
}
inline void store_narrow(float* to, vdouble value) {
  _mm256_storeu_ps(to, _mm512_maskz_cvtpd_ps(kAllWideLanes, (__m512d)value));
}

// 2^x = 2^fraction * 2^k, k = floor(x).
struct PowerOfTwo {
  vfloat x, fraction;

  explicit PowerOfTwo(vfloat value) : x(value), fraction((vfloat)_mm512_maskz_reduce_ps(kAllLanes, (__m512)x, 9)) {}

  // Return value * 2^k, or 0 if x is below -126.
  vfloat times(vfloat value) const {
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vfloat)_mm512_maskz_scalef_ps(normal, (__m512)value, (__m512)x);
  }
};

}  // namespace flashinfer::cpu
#endif
