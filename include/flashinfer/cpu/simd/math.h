// Elementary functions of vectors: in float for half types, in double if a float32 result must be accurate to
// its last bits. An exponential multiplies the error of its argument by the argument.
#pragma once

#include <initializer_list>

#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

inline vfloat abs(vfloat x) { return bit_cast<vfloat>(bit_cast<vuint>(x) & 0x7fffffffu); }
inline vdouble abs(vdouble x) { return bit_cast<vdouble>(bit_cast<vlong>(x) & INT64_MAX); }

// Return elements 1, 0, 3, 2, ...
inline vfloat swap_pairs(vfloat x) {
  const vulong pairs = bit_cast<vulong>(x);
  return bit_cast<vfloat>(pairs << 32 | pairs >> 32);
}

// Added and subtracted, these round to the nearest integer (ties to even). After the addition, the integer is
// in the low bits. For |x| below 2^22 and 2^51.
constexpr float kToInteger = 0x1.8p23f;
constexpr double kToIntegerWide = 0x1.8p52;

inline vdouble round(vdouble x) { return (x + kToIntegerWide) - kToIntegerWide; }

// Return e^x for x in [-87, 88]: 2^k e^r, k integer, |r| <= ln(2) / 2, by the series of e^r to r^7 / 7! (1
// ulp).
inline vfloat exp(vfloat x) {
  const vfloat shifted = x * 1.44269504f + kToInteger, k = shifted - kToInteger;
  const vfloat r = (x - k * 0.693359375f) - k * -2.12194440e-4f;  // ln(2) in two parts, the first with few bits
  vfloat sum = splat(1.0f / 5040);
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * r + term;
  const vuint power = (bit_cast<vuint>(shifted) + 127u) << 23;  // kToInteger's bits above k are shifted out
  return sum * bit_cast<vfloat>(power);
}

#if !defined(FLASHINFER_AVX512)
// 2^x = 2^fraction * 2^k, k = floor(x).
struct PowerOfTwo {
  vfloat fraction, shifted;

  explicit PowerOfTwo(vfloat x) {
    const vfloat clamped = max(splat(-126.5f), x);
    shifted = (clamped - 0.5f) + kToInteger;
    fraction = clamped - (shifted - kToInteger);
  }

  // Return value * 2^k, or 0 if x is below -126.
  vfloat times(vfloat value) const {
    const vuint power = (bit_cast<vuint>(shifted) + 127u) << 23;  // of -127: no bit set
    return value * bit_cast<vfloat>(power);
  }
};
#endif

// Return 2^x for x below 127, to 1.5e-7 and exact at integers; 0 below -126, so that no result is a
// denormal.
inline vfloat exp2(vfloat x) {
  const PowerOfTwo power(x);
  vfloat sum = splat(1.8671305698e-3f);  // the best polynomial of degree 5 for 2^r on [0, 1]
  for (float term : {9.0170292533e-3f, 5.5799913880e-2f, 2.4016444994e-1f, 6.9315131182e-1f, 1.0f})
    sum = sum * power.fraction + term;
  return power.times(sum);
}

// Return e^x for x in [-708, 709], to 2e-10: the series to r^8 / 8!.
inline vdouble exp(vdouble x) {
  const vdouble shifted = x * 1.4426950408889634 + kToIntegerWide, k = shifted - kToIntegerWide;
  const vdouble r = x - k * 0.6931471805599453;
  vdouble sum = vdouble{} + 1.0 / 40320;
  for (double term : {1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0}) sum = sum * r + term;
  const vlong power = (bit_cast<vlong>(shifted) + 1023) << 52;
  return sum * bit_cast<vdouble>(power);
}

// Return tanh x to a few ulp of 1: (1 - e) / (1 + e) with e = exp(-2 |x|). That loses digits near 0, where
// the odd series is used.
inline vfloat tanh(vfloat x) {
  const vfloat a = abs(x), e = exp2(a * -2.88539008f), xx = x * x;
  vfloat series = splat(0.0218694885f);
  for (float term : {-0.0539682540f, 0.133333333f, -0.333333333f, 1.0f}) series = series * xx + term;
  const vfloat far = (1.0f - e) / (1.0f + e);
  const vint sign = bit_cast<vint>(x) & INT32_MIN;
  return select(a < 0.25f, x * series, bit_cast<vfloat>(bit_cast<vint>(far) | sign));
}

struct SinCos {
  vfloat sin, cos;
};

// Return sine and cosine of angles in quarter turns. The angle is reduced in double, so that large ones lose
// no digits. The series for |angle| <= pi / 4 are good to 1 ulp.
inline SinCos sincos_quarters(Wide quarters) {
  const vdouble low = round(quarters.low), high = round(quarters.high);
  constexpr double kQuarter = 1.5707963267948966;
  const vfloat x = narrow({(quarters.low - low) * kQuarter, (quarters.high - high) * kQuarter});
  // The number of quarters modulo 4, as -2 ... 2, exact in float.
  const vfloat turn = narrow({low - 4.0 * round(low * 0.25), high - 4.0 * round(high * 0.25)});
  const vint n = __builtin_convertvector(turn, vint);
  const vfloat xx = x * x;
  vfloat s = splat(1.0f / 362880), c = splat(-1.0f / 3628800);
  for (float term : {-1.0f / 5040, 1.0f / 120, -1.0f / 6}) s = s * xx + term;
  for (float term : {1.0f / 40320, -1.0f / 720, 1.0f / 24, -0.5f, 1.0f}) c = c * xx + term;
  s = s * (xx * x) + x;
  const vint odd = (n & 1) != 0;
  const vint sin_sign = (n & 2) << 30, cos_sign = ((n + 1) & 2) << 30;
  return {bit_cast<vfloat>(bit_cast<vint>(select(odd, c, s)) ^ sin_sign),
          bit_cast<vfloat>(bit_cast<vint>(select(odd, s, c)) ^ cos_sign)};
}

}  // namespace flashinfer::cpu
