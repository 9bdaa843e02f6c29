// Vectors of float as wide as the CPU level has registers, loaded from and stored to float32, float16 and bfloat16, and
// loaded from float8.
//
// GCC's and Clang's vector extensions write the arithmetic; intrinsics stand only where those have no word for an
// instruction (conversion of float16) or none that compiles well (bfloat16). Rounding is to nearest, ties to even,
// everywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace flashinfer {

struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
struct fp8_e4m3_t {  // no infinities, NaN is all ones
  uint8_t bits;
};
struct fp8_e5m2_t {  // the upper half of a half_t
  uint8_t bits;
};

namespace cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(4 * kLanes)));
typedef int32_t vint __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vuint __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vushort __attribute__((vector_size(2 * kLanes)));

#if defined(__AVX512F__)
// GCC 12 warns that the unmasked forms of its own headers use an uninitialised value (bug 105593).
constexpr __mmask16 kAllLanes = 0xffff;
#endif

inline vfloat splat(float value) { return vfloat{} + value; }

template <typename V, typename P>
inline V load_raw(const P* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps every bit: the two types must have one size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// ---- one element -------------------------------------------------------------------------------------------------

inline float to_float(float value) { return value; }

inline float to_float(bfloat16_t value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

inline float to_float(half_t value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Shifted into a float whose exponent is 112 too small; the exact product with 2^112 also rights denormals.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

inline float to_float(fp8_e5m2_t value) { return to_float(half_t{static_cast<uint16_t>(value.bits << 8)}); }

// As a half_t, with an exponent that is 8 too small.
inline float to_float(fp8_e4m3_t value) {
  const uint32_t sign = value.bits & 0x80u, magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7fu) return bit_cast<float>(0x7fc00000u | sign << 24);
  return to_float(half_t{static_cast<uint16_t>(sign << 8 | magnitude << 7)}) * 256.0f;
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline bfloat16_t from_float<bfloat16_t>(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0u};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
inline half_t from_float<half_t>(float value) {
#if defined(__F16C__)
  return {static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000u;
  const float magnitude = std::fabs(value);
  if (!(magnitude <= 0x1.ffcp15f)) {  // too large, infinite or NaN
    if (magnitude != magnitude) return {static_cast<uint16_t>(sign | 0x7e00u)};
    return {static_cast<uint16_t>(sign | (magnitude < 0x1.ffep15f ? 0x7bffu : 0x7c00u))};
  }
  // Adding a power of two whose last bit is the result's last bit makes the hardware round to it.
  const uint32_t exponent = bit_cast<uint32_t>(magnitude) >> 23;
  const uint32_t kept = exponent < 113u ? 113u : exponent;
  const float anchor = bit_cast<float>((kept + 13u) << 23);
  const uint32_t rounded = bit_cast<uint32_t>(magnitude + anchor) - bit_cast<uint32_t>(anchor);
  return {static_cast<uint16_t>(sign | (((kept - 113u) << 10) + rounded))};
#endif
}

// ---- kLanes elements ---------------------------------------------------------------------------------------------

inline vfloat load(const float* from) { return load_raw<vfloat>(from); }

// GCC 12 splits the widening and narrowing of integer vectors into halves: bfloat16 is written out where it can be.
inline vfloat load(const bfloat16_t* from) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtepu16_epi32(kAllLanes, load_raw<__m256i>(from)),
                                         16);
#elif defined(__AVX2__)
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_raw<__m128i>(from)), 16);
#else
  return bit_cast<vfloat>(__builtin_convertvector(load_raw<vushort>(from), vuint) << 16);
#endif
}

inline vfloat load(const half_t* from) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_cvtph_ps(kAllLanes, load_raw<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vfloat)_mm256_cvtph_ps(load_raw<__m128i>(from));
#else
  vfloat value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = to_float(from[lane]);
  return value;
#endif
}

inline vfloat load(const fp8_e5m2_t* from) {
#if defined(__AVX512BW__)
  return (vfloat)_mm512_maskz_cvtph_ps(kAllLanes, _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_raw<__m128i>(from)), 8));
#elif defined(__AVX2__) && defined(__F16C__)
  return (vfloat)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8));
#else
  vfloat value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = to_float(from[lane]);
  return value;
#endif
}

inline vfloat load(const fp8_e4m3_t* from) {
#if defined(__AVX2__) && defined(__F16C__)
  // The sign is extended over the bit that the exponent does not reach, which goes.
#if defined(__AVX512BW__)
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_raw<__m128i>(from)), 7);
  const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(-0x4001));
  const vfloat value = (vfloat)_mm512_maskz_cvtph_ps(kAllLanes, halves) * 256.0f;
#else
  const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)), 7);
  const vfloat value = (vfloat)_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(-0x4001))) * 256.0f;
#endif
  const vuint bits = bit_cast<vuint>(value), is_nan = bit_cast<vuint>((bits & 0x7fffffffu) == 0x43f00000u);  // 480
  return bit_cast<vfloat>(bits | is_nan >> 1);
#else
  vfloat value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = to_float(from[lane]);
  return value;
#endif
}

inline void store(float* to, vfloat value) { std::memcpy(to, &value, sizeof(value)); }

#if defined(__AVX512BW__)
// The upper half of each element's 32 bits is its bfloat16.
inline __m512i rounded_to_bfloat16(vfloat value) {
  const __m512i bits = (__m512i)value;
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
  const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
}
#endif

inline void store(bfloat16_t* to, vfloat value) {
#if defined(__AVX512BW__)
  const __m512i upper_halves = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21,
                                                19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i result = _mm512_permutexvar_epi16(upper_halves, rounded_to_bfloat16(value));
  std::memcpy(to, &result, sizeof(result) / 2);
#else
  const vuint bits = bit_cast<vuint>(value);
  const vuint is_nan = bit_cast<vuint>(value != value);
  const vuint rounded = (((bits + 0x7fffu + (bits >> 16 & 1u)) & ~is_nan) | (0x7fc00000u & is_nan)) >> 16;
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
  const __m128i result = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  const vushort result = __builtin_convertvector(rounded, vushort);
#endif
  std::memcpy(to, &result, sizeof(result));
#endif
}

inline void store(half_t* to, vfloat value) {
#if defined(__AVX512F__)
  const __m256i result = _mm512_maskz_cvtps_ph(kAllLanes, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &result, sizeof(result));
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i result = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &result, sizeof(result));
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = from_float<half_t>(value[lane]);
#endif
}

// 2 * kLanes elements, in an order of the type's own: the same in every load_two and store_two of that type. For work
// on each element alone, which then costs bfloat16 half the conversions.
struct Two {
  vfloat first, second;
};

template <typename T>
inline Two load_two(const T* from) {
  return {load(from), load(from + kLanes)};
}

template <typename T>
inline void store_two(T* to, Two values) {
  store(to, values.first);
  store(to + kLanes, values.second);
}

#if defined(__AVX512BW__)
template <>
inline Two load_two(const bfloat16_t* from) {  // the even elements, then the odd ones
  const __m512i both = load_raw<__m512i>(from);
  return {(vfloat)_mm512_slli_epi32(both, 16), (vfloat)_mm512_and_si512(both, _mm512_set1_epi32(-0x10000))};
}

template <>
inline void store_two(bfloat16_t* to, Two values) {
  const __m512i even = _mm512_srli_epi32(rounded_to_bfloat16(values.first), 16);
  const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaau, even, rounded_to_bfloat16(values.second));
  std::memcpy(to, &both, sizeof(both));
}
#endif

// The first `count` < kLanes elements; the other lanes are zero.
template <typename T>
inline vfloat load_some(const T* from, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_some(T* to, vfloat value, int64_t count) {
  T padded[kLanes];
  store(padded, value);
  std::memcpy(to, padded, count * sizeof(T));
}

// b where either is NaN. GCC 12 makes a comparison and a blend of the vector's conditional expression.
inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_max_ps(kAllLanes, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline float sum(vfloat value) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}

// Lanes where `mask` is set from `yes`, the others from `no`.
inline vfloat select(vint mask, vfloat yes, vfloat no) {
  return bit_cast<vfloat>((bit_cast<vint>(yes) & mask) | (bit_cast<vint>(no) & ~mask));
}

// Calls body(i, count) over [0, n): whole vectors first (count == kLanes), then what is left.
template <typename Body>
inline void for_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

// The same where the number is known: code for what is left is there only if something is.
template <int kCount, typename Body>
inline void for_lanes(const Body& body) {
  for (int i = 0; i + kLanes <= kCount; i += kLanes) body(i, kLanes);
  if constexpr (kCount % kLanes != 0) body(kCount / kLanes * kLanes, kCount % kLanes);
}

// The same, first body_two(i) for 2 * kLanes elements at a time.
template <typename BodyTwo, typename Body>
inline void for_lanes(int64_t n, const BodyTwo& body_two, const Body& body) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) body_two(i);
  for (; i < n; i += kLanes) body(i, static_cast<int>(n - i < kLanes ? n - i : kLanes));
}

template <typename T>
inline vfloat load(const T* from, int count) {
  return count == kLanes ? load(from) : load_some(from, count);
}

template <typename T>
inline void store(T* to, vfloat value, int count) {
  count == kLanes ? store(to, value) : store_some(to, value, count);
}

}  // namespace cpu
}  // namespace flashinfer
