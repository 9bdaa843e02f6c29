// Formats of 8-bit numbers: their steps and limits.
#pragma once

#include "harness.h"

namespace driver {

// An 8-bit type: mantissa bits, exponent of the smallest normal number, and limits.
struct Format {
  int mantissa, least;
  double most, min_number = -most;

  // Return the largest distance of a number from the nearest number of the type.
  double half_unit(double number) const {
    const int exponent = number == 0 ? least : std::max(std::ilogb(number), least);
    return std::ldexp(0.5, exponent - mantissa);
  }
};

template <typename Q>
constexpr Format kFormat = {3, -6, 448};
template <>
inline constexpr Format kFormat<fp8_e5m2_t> = {2, -14, 57344};
template <>
inline constexpr Format kFormat<int8_t> = {7, 7, 127, -128};  // unit 1 everywhere

template <typename Q>
constexpr double kNan = std::is_same_v<Q, int8_t> ? 0 : NAN;
template <typename Q>
constexpr double kUnwritten = std::is_same_v<Q, int8_t> ? -1 : NAN;

template <typename Q>
inline double number_of(Q x) {
  if constexpr (std::is_same_v<Q, int8_t>)
    return x;
  else
    return value(x);
}

// Check a number that is `exact` rounded to nearest and clamped, after a relative error of 1e-6 and `before`.
template <typename Q>
inline void check_eight_bits(const char* what, int64_t at, Q got, double exact, double before = 0) {
  const double want = std::isnan(exact) ? kNan<Q> : std::clamp(exact, kFormat<Q>.min_number, kFormat<Q>.most);
  const double bound =
      std::isnan(exact) ? 0 : kFormat<Q>.half_unit(std::fabs(want) + before) + 1e-6 * std::fabs(want) + before;
  check(what, at, number_of(got), want, bound);
}

}  // namespace driver
