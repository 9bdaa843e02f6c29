// Elements that change places: squares of kLanes vectors transposed, and vectors reduced to one number each.
#pragma once

#include <utility>

#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// Elements of a and b in turns of kWidth: lanes l of `low` are a[l] or b[l - kWidth], of `high` a[l + kWidth] or b[l].
template <int kWidth, int... kLane>
inline void interleave(vfloat& a, vfloat& b, std::integer_sequence<int, kLane...>) {
  const vfloat low = shuffle<(kLane & kWidth ? kLanes + kLane - kWidth : kLane)...>(a, b);
  const vfloat high = shuffle<(kLane & kWidth ? kLanes + kLane : kLane + kWidth)...>(a, b);
  a = low, b = high;
}

using EachLane = std::make_integer_sequence<int, kLanes>;

template <int kWidth = 1>
inline void transpose(vfloat (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & kWidth)) interleave<kWidth>(rows[i], rows[i | kWidth], EachLane{});
  if constexpr (2 * kWidth < kLanes) transpose<2 * kWidth>(rows);
}

// One number of all elements, halves with halves.
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

// Sums of the elements of each of kLanes vectors, as one vector.
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
