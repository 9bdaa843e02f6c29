// Transposition of squares of kLanes vectors, and reduction of each vector to one number.
#pragma once

#include <utility>

#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// Interleaves elements of a and b in groups of kWidth: lane l of `low` is a[l] or b[l - kWidth], of `high`
// a[l + kWidth] or b[l].
template <int kWidth, int... kLane>
inline void interleave(vfloat& a, vfloat& b, std::integer_sequence<int, kLane...>) {
  const vfloat low = shuffle<(kLane & kWidth ? kLanes + kLane - kWidth : kLane)...>(a, b);
  const vfloat high = shuffle<(kLane & kWidth ? kLanes + kLane : kLane + kWidth)...>(a, b);
  a = low, b = high;
}

using EachLane = std::make_integer_sequence<int, kLanes>;

// Transpose squares by shuffles that processors have. The first two functions work within four lanes, and
// kUpper takes the upper two of each four. The others move four lanes at a time, and kUpper takes the odd
// groups.
template <bool kUpper, int... kLane>
inline vfloat zip_ones(vfloat a, vfloat b, std::integer_sequence<int, kLane...>) {
  return shuffle<(kLane % 2 * kLanes + kLane / 4 * 4 + kLane % 4 / 2 + 2 * kUpper)...>(a, b);
}
template <bool kUpper, int... kLane>
inline vfloat zip_twos(vfloat a, vfloat b, std::integer_sequence<int, kLane...>) {
  return shuffle<(kLane % 4 / 2 * kLanes + kLane / 4 * 4 + kLane % 2 + 2 * kUpper)...>(a, b);
}
template <bool kUpper, int... kLane>
inline vfloat take_fours(vfloat a, vfloat b, std::integer_sequence<int, kLane...>) {
  constexpr int kHalf = kLanes / 2;
  return shuffle<(kLane / kHalf * kLanes + kLane % kHalf / 4 * 8 + kLane % 4 + 4 * kUpper)...>(a, b);
}

inline void transpose(vfloat (&rows)[kLanes]) {
  constexpr EachLane kEach{};
  for (int i = 0; i < kLanes; i += 4) {
    const vfloat low = zip_ones<false>(rows[i], rows[i + 1], kEach), high = zip_ones<true>(rows[i], rows[i + 1], kEach);
    const vfloat next_low = zip_ones<false>(rows[i + 2], rows[i + 3], kEach);
    const vfloat next_high = zip_ones<true>(rows[i + 2], rows[i + 3], kEach);
    rows[i] = zip_twos<false>(low, next_low, kEach), rows[i + 1] = zip_twos<true>(low, next_low, kEach);
    rows[i + 2] = zip_twos<false>(high, next_high, kEach), rows[i + 3] = zip_twos<true>(high, next_high, kEach);
  }
  if constexpr (kLanes > 4) {
    for (int step = kLanes / 8; step > 0; step /= 2) {
      vfloat taken[kLanes];
      for (int i = 0; i < kLanes / 8; ++i) {
        for (int j = 0; j < 4; ++j) {
          taken[4 * i + j] = take_fours<false>(rows[8 * i + j], rows[8 * i + 4 + j], kEach);
          taken[kLanes / 2 + 4 * i + j] = take_fours<true>(rows[8 * i + j], rows[8 * i + 4 + j], kEach);
        }
      }
      for (int i = 0; i < kLanes; ++i) rows[i] = taken[i];
    }
  }
}

// Reduce all elements to one number, halves with halves.
template <int kWidth, typename Op, int... kLane>
inline float reduce(vfloat value, const Op& op, std::integer_sequence<int, kLane...> lanes) {
  value = op(value, shuffle<(kLane ^ kWidth)...>(value, value));
  if constexpr (kWidth > 1) return reduce<kWidth / 2>(value, op, lanes);
  return value[0];
}
inline float total_of(vfloat value) {
  return reduce<kLanes / 2>(value, [](vfloat a, vfloat b) { return a + b; }, EachLane{});
}
inline float maximum_of(vfloat value) {
  return reduce<kLanes / 2>(value, [](vfloat a, vfloat b) { return max(a, b); }, EachLane{});
}

// Return the sums of the elements of each of kLanes vectors, as one vector.
template <int kWidth = 1>
inline vfloat sums_of(vfloat (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i += 2 * kWidth) {
    interleave<kWidth>(rows[i], rows[i + kWidth], EachLane{});
    rows[i] += rows[i + kWidth];
  }
  if constexpr (2 * kWidth < kLanes) return sums_of<2 * kWidth>(rows);
  return rows[0];
}

}  // namespace flashinfer::cpu
