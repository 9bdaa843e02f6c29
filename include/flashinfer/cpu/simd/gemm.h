// Products of small float matrices: what a tile of queries and a block of keys or values meet in.
//
// The left factor is read a number at a time, as it stands; the right one is packed into panels of kPanel columns, so
// that a row of a panel is kPanelVectors registers and the panel is read from beginning to end.
#pragma once

#include <utility>

#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// Sums of a product are kept in kGemmRows x kPanelVectors registers, which leaves some for a row of the panel.
constexpr int kPanelVectors = 2, kPanel = kPanelVectors * kLanes;
constexpr int kGemmRows = kLanes == 16 ? 8 : 4;

constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

// What a product's sums become: c = sum, or c = c * factor of the row + sum.
enum class Sums { kSet, kScaleAndAdd };

// Rows of a [kRows, depth] with kLeft numbers between rows, times a panel [depth, kPanel], to c with kTo numbers
// between rows.
template <int kRows, int kVectors, int kLeft, int kTo, Sums kSums>
inline void multiply_panel(int depth, const float* __restrict a, const float* __restrict panel, float* __restrict c,
                           const float* __restrict factor) {
  vfloat sums[kRows][kVectors] = {};
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k) {
    vfloat right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = load(panel + k * kPanel + v * kLanes);
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kVectors; ++v) sums[row][v] += right[v] * a[row * kLeft + k];
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + row * kTo + v * kLanes;
      store(to, kSums == Sums::kSet ? sums[row][v] : load(to) * factor[row] + sums[row][v]);
    }
  }
}

// ---- packing -----------------------------------------------------------------------------------------------------

// Elements of a and b in turns of kWidth: lanes l of `low` are a[l] or b[l - kWidth], of `high` a[l + kWidth] or b[l].
template <int kWidth, int... kLane>
inline void interleave(vfloat& a, vfloat& b, std::integer_sequence<int, kLane...>) {
  const vfloat low = __builtin_shuffle(a, b, vint{(kLane & kWidth ? kLanes + kLane - kWidth : kLane)...});
  const vfloat high = __builtin_shuffle(a, b, vint{(kLane & kWidth ? kLanes + kLane : kLane + kWidth)...});
  a = low, b = high;
}

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int kWidth = 1>
inline void transpose(vfloat (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & kWidth)) interleave<kWidth>(rows[i], rows[i | kWidth], Lanes{});
  if constexpr (2 * kWidth < kLanes) transpose<2 * kWidth>(rows);
}

// One number of all elements, halves with halves.
template <int kWidth, typename Op, int... kLane>
inline float reduce(vfloat value, const Op& op, std::integer_sequence<int, kLane...> lanes) {
  value = op(value, __builtin_shuffle(value, vint{(kLane ^ kWidth)...}));
  if constexpr (kWidth > 1) return reduce<kWidth / 2>(value, op, lanes);
  return value[0];
}
inline float total_of(vfloat value) {
  return reduce<kLanes / 2>(value, [](vfloat a, vfloat b) { return a + b; }, Lanes{});
}
inline float maximum_of(vfloat value) {
  return reduce<kLanes / 2>(value, [](vfloat a, vfloat b) { return max(a, b); }, Lanes{});
}

// Sums of the elements of each of kLanes vectors, as one vector.
template <int kWidth = 1>
inline vfloat sums_of(vfloat (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i += 2 * kWidth) {
    interleave<kWidth>(rows[i], rows[i + kWidth], Lanes{});
    rows[i] += rows[i + kWidth];
  }
  if constexpr (2 * kWidth < kLanes) return sums_of<2 * kWidth>(rows);
  return rows[0];
}

// kLanes rows of kDepth elements as columns of a panel.
template <int kDepth, typename T>
inline void pack_columns(const T* const* rows, float* panel) {
  for_lanes<kDepth>([&](int d, int count) {
    vfloat block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = load(rows[i] + d, count);
    transpose(block);
    for (int i = 0; i < count; ++i) store(panel + (d + i) * kPanel, block[i]);
  });
}

// A row of kWidth elements as a row of panels that are `stride` numbers apart. A last panel that is not full is filled
// up with zeros as far as a vector goes.
template <int kWidth, typename T>
inline void pack_row(const T* row, float* panels, int64_t stride) {
  for_lanes<kWidth>([&](int d, int count) { store(panels + d / kPanel * stride + d % kPanel, load(row + d, count)); });
}

}  // namespace flashinfer::cpu
