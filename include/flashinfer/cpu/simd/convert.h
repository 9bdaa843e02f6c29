// Conversions of one element of each type to and from float, and code that vector conversions share. Rounding
// is to nearest, ties to even, everywhere.
#pragma once

#include <cmath>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <flashinfer/common/dtype.h>
#include <flashinfer/cpu/simd/registers.h>

namespace flashinfer::cpu {

inline float to_float(float value) { return value; }

inline float to_float(bfloat16_t value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

inline float to_float(half_t value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#elif defined(__aarch64__)
  return bit_cast<__fp16>(value.bits);
#else
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Shifted into a float whose exponent is 112 too small. The exact product with 2^112 also corrects
  // denormals.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(magnitude << 13) * 0x1p112f));
#endif
}

inline float to_float(fp8_e5m2_t value) { return to_float(half_t{static_cast<uint16_t>(value.bits << 8)}); }

// Converts as a half_t with an exponent that is 8 too small.
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
#elif defined(__aarch64__)
  return {bit_cast<uint16_t>(static_cast<__fp16>(value))};
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

// Return each element as a bfloat16 in the low half of 32 bits.
inline vuint bfloat16_bits(vfloat value) {
  const vuint bits = bit_cast<vuint>(value);
  const vuint is_nan = bit_cast<vuint>(value != value);
  return (((bits + 0x7fffu + (bits >> 16 & 1u)) & ~is_nan) | (0x7fc00000u & is_nan)) >> 16;
}

}  // namespace flashinfer::cpu
