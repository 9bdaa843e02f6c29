// Products of small matrices of bfloat16 with sums in float, two depths at a time: AVX512-BF16.
//
// Two consecutive depths are one lane of 32 bits, on both sides: a pair of the left row multiplies the pairs
// of kPanel columns. Numbers below 2^-126 count as zero. Every float8 is exact in bfloat16.
#pragma once

#include <flashinfer/cpu/simd/gemm.h>

namespace flashinfer::cpu {

#if defined(FLASHINFER_AVX512) && defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

inline vfloat add_pairs(vfloat sum, vuint a, vuint b) {
  return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
inline void store_rounded(bfloat16_t* to, vfloat value) {
  const __m256bh result = _mm512_cvtneps_pbh((__m512)value);
  std::memcpy(to, &result, sizeof(result));
}

// Return pairs with a first number from `first` and a second from `second`, rows of at most kLanes elements.
template <typename T>
inline vuint pairs_of(const T* first, const T* second, int count) {
  const vuint upper = bit_cast<vuint>(load(second, count));  // the lower half is 0, except in a NaN of a float8
  return bit_cast<vuint>(load(first, count)) >> 16 | (sizeof(T) == 1 ? upper & 0xffff0000u : upper);
}
// Return `count` pairs of adjacent numbers, at most kLanes.
inline vuint neighbours(const bfloat16_t* from, int count) {
  vuint pairs{};
  std::memcpy(&pairs, from, sizeof(uint32_t) * count);
  return pairs;
}
template <typename T>
inline vuint neighbours(const T* from, int count) {
  const int more = 2 * count - kLanes;
  const vfloat low = load(from, more < 0 ? 2 * count : kLanes), high = more > 0 ? load(from + kLanes, more) : vfloat{};
  return bit_cast<vuint>(_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#else
constexpr bool kHasPairs = false;

vfloat add_pairs(vfloat sum, vuint a, vuint b);
void store_rounded(bfloat16_t* to, vfloat value);
template <typename T>
vuint pairs_of(const T* first, const T* second, int count);
template <typename T>
vuint neighbours(const T* from, int count);
#endif

// multiply_panel for pairs: rows of a [kRows, depth], kLeft numbers apart, times a panel of pairs [depth / 2,
// kPanel]. kSet multiplies all sums by a factor. After an odd depth, the panel may hold anything.
template <int kRows, int kVectors, int kLeft, int kTo, Sums kSums>
inline void multiply_pairs(int depth, const bfloat16_t* __restrict a, const bfloat16_t* __restrict panel,
                           float* __restrict c, const float* __restrict factor) {
  vfloat sums[kRows][kVectors] = {};
  const auto add = [&](int k, vuint kept) {
    vuint right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = load_raw<vuint>(panel + k * kPanel + 2 * v * kLanes) & kept;
    for (int row = 0; row < kRows; ++row) {
      const vuint left = vuint{} + load_raw<uint32_t>(a + row * kLeft + k);
      for (int v = 0; v < kVectors; ++v) sums[row][v] = add_pairs(sums[row][v], left, right[v]);
    }
  };
  int k = 0;
#pragma GCC unroll 2
  for (; k + 2 <= depth; k += 2) add(k, ~vuint{});
  if (k < depth) add(k, vuint{} + 0xffffu);
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + row * kTo + v * kLanes;
      store(to, kSums == Sums::kSet ? sums[row][v] * *factor : load(to) * factor[row] + sums[row][v]);
    }
  }
}

// Pack kLanes rows of kDepth elements as columns of a panel of pairs. A pair is moved as a float.
template <int kDepth, typename T>
inline void pack_column_pairs(const T* const* rows, bfloat16_t* panel) {
  static_assert(kDepth % 2 == 0, "a row is whole pairs");
  for_lanes<kDepth / 2>([&](int pair, int count) {
    vfloat block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = bit_cast<vfloat>(neighbours(rows[i] + 2 * pair, count));
    transpose(block);
    for (int i = 0; i < count; ++i) std::memcpy(panel + 2 * (pair + i) * kPanel, &block[i], sizeof(vfloat));
  });
}

// Pack two rows of kWidth elements as a row of panels of pairs, `stride` numbers apart.
template <int kWidth, typename T>
inline void pack_row_pairs(const T* first, const T* second, bfloat16_t* panels, int64_t stride) {
  for_lanes<kWidth>([&](int d, int count) {
    const vuint pairs = pairs_of(first + d, second + d, count);
    std::memcpy(panels + d / kPanel * stride + 2 * (d % kPanel), &pairs, sizeof(pairs));
  });
}

}  // namespace flashinfer::cpu
