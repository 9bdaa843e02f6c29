// The two products of decode, S = Q K^T and O += P V, with rows read in the cache.
#pragma once

#include <cstring>
#include <type_traits>

#include <flashinfer/cpu/simd/gemm.h>

namespace flashinfer::cpu {

constexpr int kDecodeKeys = 64;           // of a block
constexpr int kDotSums = kRegisters / 2;  // independent sums that hide the latency of an addition

// Prefetch a row. The hardware cannot predict it: the next row is on another page.
template <int kDim, typename T>
inline void prefetch_row(const T* row) {
  for (int d = 0; d < kDim; d += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

// S = Q K^T for kRows queries, kStride numbers apart, and `count` keys. Reads and writes round_up(count,
// kDotSums) of them. `ahead`: addresses of as many rows of kAhead elements to prefetch, or null.
template <int kRows, int kDepth, int kStride, int kAhead, typename T, typename Ahead>
inline void dot_products(const float* q, const T* const* keys, int64_t offset, int count, float* logits,
                         const Ahead* const* ahead) {
  constexpr int kKeys = kDotSums / kRows;
  for (int t = 0; t < count; t += kKeys) {
    if (ahead)
      for (int i = 0; i < kKeys; ++i) prefetch_row<kAhead>(ahead[t + i]);
    vfloat sums[kDotSums / kLanes][kLanes] = {};
    const auto add = [&](int d, int width) {
      vfloat queries[kRows];
      for (int row = 0; row < kRows; ++row) queries[row] = load(q + row * kStride + d);
      for (int i = 0; i < kKeys; ++i) {
        const vfloat key = load(keys[t + i] + offset + d, width);
        for (int row = 0; row < kRows; ++row)
          sums[(row * kKeys + i) / kLanes][(row * kKeys + i) % kLanes] += queries[row] * key;
      }
    };
    for (int d = 0; d + kLanes <= kDepth; d += kLanes) add(d, kLanes);
    if constexpr (kDepth % kLanes != 0) add(kDepth / kLanes * kLanes, kDepth % kLanes);
    float products[kDotSums];
    for (int i = 0; i < kDotSums; i += kLanes) store(products + i, sums_of(sums[i / kLanes]));
    for (int row = 0; row < kRows; ++row)
      std::memcpy(logits + row * kDecodeKeys + t, products + row * kKeys, kKeys * sizeof(float));
  }
}

// O = O * rescale + P V for elements [d, d + kWidth) of kRows rows, kStride numbers apart.
template <int kRows, int kWidth, int kStride, int kAhead, typename T>
inline void add_values(const float* weights, const T* const* values, int64_t offset, int count, const float* rescale,
                       float* sums, const T* const* ahead) {
  constexpr int kVectors = (kWidth + kLanes - 1) / kLanes;
  vfloat added[kRows][kVectors] = {};
  for (int t = 0; t < count; ++t) {
    if (ahead) prefetch_row<kAhead>(ahead[t]);
    vfloat value[kVectors];
    for (int v = 0; v < kVectors; ++v)
      value[v] = load(values[t] + offset + v * kLanes, kWidth - v * kLanes < kLanes ? kWidth - v * kLanes : kLanes);
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kVectors; ++v) added[row][v] += value[v] * weights[row * kDecodeKeys + t];
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + row * kStride + v * kLanes;
      store(to, load(to) * rescale[row] + added[row][v]);
    }
  }
}

template <int kRows, int kDim, int kStride, typename T>
inline void add_rows(const float* weights, const T* const* values, int64_t offset, int count, const float* rescale,
                     float* sums, const T* const* ahead) {
  constexpr int kChunk = (kLanes * kRegisters < 128 ? 2 : 4) * kLanes, kRest = kDim % kChunk;
  for (int d = 0; d + kChunk <= kDim; d += kChunk)
    add_values<kRows, kChunk, kStride, kDim>(weights, values, offset + d, count, rescale, sums + d,
                                             d == 0 ? ahead : nullptr);
  if constexpr (kRest != 0)
    add_values<kRows, kRest, kStride, kDim>(weights, values, offset + kDim - kRest, count, rescale, sums + kDim - kRest,
                                            kDim == kRest ? ahead : nullptr);
}

// Call body(row, constant of 4, 2 or 1) for groups of that many rows that cover [0, rows).
template <typename Body>
inline void for_rows(int rows, const Body& body) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  if (row + 2 <= rows) body(row, std::integral_constant<int, 2>{}), row += 2;
  if (row < rows) body(row, std::integral_constant<int, 1>{});
}

}  // namespace flashinfer::cpu
