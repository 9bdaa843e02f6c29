// Products of small float matrices, for a tile of queries and a block of keys or values.
//
// The left factor is read one number at a time, without packing. The right factor is packed into panels of
// kPanel columns: a row of a panel fills kPanelVectors registers, and the panel is read sequentially.
#pragma once

#include <flashinfer/cpu/simd/transpose.h>

namespace flashinfer::cpu {

// A product has kGemmRows x kPanelVectors sums in registers. The remaining ones hold a row of the panel.
constexpr int kPanelVectors = 2, kPanel = kPanelVectors * kLanes;
constexpr int kGemmRows = kRegisters == 32 ? 8 : 4;

constexpr int round_up(int value, int step) { return (value + step - 1) / step * step; }

// The update of a product: c = sum, or c = c * factor of the row + sum.
enum class Sums { kSet, kScaleAndAdd };

// Multiply rows of a [kRows, depth], kLeft numbers apart, by a panel [depth, kPanel]. Rows of c are kTo
// apart.
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

// c += a * panel, or c = a * panel if kSet. Consecutive depths of `a` are kDepthStep apart, rows kRowStep.
// After kPanel depths, `a` advances by `segment`.
template <int kRows, int kVectors, int kRowStep, int kDepthStep, int kTo, bool kSet>
inline void multiply_block(int depth, const float* __restrict a, int64_t segment, const float* __restrict panel,
                           float* __restrict c) {
  vfloat sums[kRows][kVectors] = {};
  for (int start = 0; start < depth; start += kPanel, a += segment) {
    const int stop = depth - start < kPanel ? depth - start : kPanel;
#pragma GCC unroll 2
    for (int k = 0; k < stop; ++k, panel += kPanel) {
      vfloat right[kVectors];
      for (int v = 0; v < kVectors; ++v) right[v] = load(panel + v * kLanes);
      for (int row = 0; row < kRows; ++row)
        for (int v = 0; v < kVectors; ++v) sums[row][v] += right[v] * a[row * kRowStep + k * kDepthStep];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + row * kTo + v * kLanes;
      store(to, kSet ? sums[row][v] : load(to) + sums[row][v]);
    }
  }
}

// ---- packing ----------------------------------------------------------------------------------------------

// Pack kLanes rows of kDepth elements as columns of a panel.
template <int kDepth, typename T>
inline void pack_columns(const T* const* rows, float* panel) {
  for_lanes<kDepth>([&](int d, int count) {
    vfloat block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = load(rows[i] + d, count);
    transpose(block);
    for (int i = 0; i < count; ++i) store(panel + (d + i) * kPanel, block[i]);
  });
}

// Pack a row of kWidth elements as a row of panels, `stride` numbers apart. The last panel is padded with
// zeros to a whole vector.
template <int kWidth, typename T>
inline void pack_row(const T* row, float* panels, int64_t stride) {
  for_lanes<kWidth>([&](int d, int count) { store(panels + d / kPanel * stride + d % kPanel, load(row + d, count)); });
}

// Pack columns of a size that is known only at run time.
template <typename T>
inline void pack_columns(const T* const* rows, int depth, float* panel) {
  for_lanes(depth, [&](int64_t d, int count) {
    vfloat block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = load(rows[i] + d, count);
    transpose(block);
    for (int i = 0; i < count; ++i) store(panel + (d + i) * kPanel, block[i]);
  });
}

template <typename T>
inline void pack_row(const T* row, int width, float* panels, int64_t stride) {
  for_lanes(width,
            [&](int64_t d, int count) { store(panels + d / kPanel * stride + d % kPanel, load(row + d, count)); });
}

}  // namespace flashinfer::cpu
