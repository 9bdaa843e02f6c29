// Products of matrices of any size: packed rows, columns packed into panels, sums in registers.
//
// A unit is 32 bits of the depth: a float, or a pair of bfloat16 if the processor multiplies pairs. A sum
// runs over the depth in rising order, whatever else is multiplied with it. A row's result depends only on
// that row.
#pragma once

#include <type_traits>

#include <flashinfer/cpu/simd/gemm_bf16.h>

namespace flashinfer::cpu {

constexpr int kTileVectors = kRegisters == 32 ? 4 : 2, kTileColumns = kTileVectors * kLanes, kTileRows = 6;

using Pair = uint32_t;  // a pair of bfloat16, the first in the lower half
template <typename Unit>
constexpr int kUnitDepth = std::is_same_v<Unit, Pair> ? 2 : 1;

// Types whose every number is exact in bfloat16.
template <typename T>
constexpr bool kFitsPairs = sizeof(T) == 1 || std::is_same_v<T, bfloat16_t>;

inline vfloat add_product(vfloat sum, float left, vfloat right) { return sum + right * left; }
inline vfloat add_product(vfloat sum, Pair left, vfloat right) {
  if constexpr (kHasPairs) return add_pairs(sum, vuint{} + left, bit_cast<vuint>(right));
  return sum;
}

// Load 2 * kLanes numbers as kLanes pairs.
template <typename T>
inline vfloat load_pairs(const T* from) {
#if defined(FLASHINFER_AVX512) && defined(__AVX512BF16__)
  return (vfloat)_mm512_cvtne2ps_pbh((__m512)load(from + kLanes), (__m512)load(from));
#else
  return load(from);  // never called
#endif
}
#if defined(FLASHINFER_AVX512) && defined(__AVX512BF16__)
inline vfloat load_pairs(const bfloat16_t* from) { return load_raw<vfloat>(from); }
// Exponents differ by 120, except for the seven numbers below 2^-6, which are multiples of 2^-9.
inline vfloat load_pairs(const fp8_e4m3_t* from) {
  const auto each = [](int bits) { return _mm512_set1_epi16(static_cast<short>(bits)); };
  const __m512i small =
      _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i bits = _mm512_cvtepi8_epi16(load_raw<__m256i>(from)), size = _mm512_and_si512(bits, each(0x7f));
  __m512i pairs = _mm512_add_epi16(_mm512_slli_epi16(size, 4), each(120 << 7));
  pairs = _mm512_mask_permutexvar_epi16(pairs, _mm512_testn_epi16_mask(bits, each(0x78)), bits, small);
  pairs = _mm512_mask_mov_epi16(pairs, _mm512_cmpeq_epi16_mask(size, each(0x7f)), each(0x7fc0));
  return (vfloat)_mm512_or_si512(pairs, _mm512_and_si512(bits, each(0x8000)));
}
#endif

// Load kLanes units of a row of T: `count` numbers, then zeros.
template <typename Unit, typename T>
inline vfloat load_units(const T* from, int64_t count) {
  if constexpr (kUnitDepth<Unit> == 1) {
    return load(from, static_cast<int>(count < kLanes ? count : kLanes));
  } else {
    if (count >= 2 * kLanes) return load_pairs(from);
    T padded[2 * kLanes] = {};  // the copy is a call and takes as long as many loads
    std::memcpy(padded, from, count * sizeof(T));
    return load_pairs(padded);
  }
}

// Pack a row of T as units, rounded up to whole vectors.
template <typename Unit, typename T>
inline void pack_units(const T* row, int64_t depth, Unit* to) {
  constexpr int kStep = kLanes * kUnitDepth<Unit>;
  for (int64_t d = 0; d < depth; d += kStep, to += kLanes) {
    const vfloat units = load_units<Unit>(row + d, depth - d);
    std::memcpy(to, &units, sizeof(units));
  }
}

// Pack `columns` columns, each a row of T in memory, `stride` apart: [depth][kTileColumns] units.
template <typename Unit, typename T>
inline void pack_columns_of(const T* from, int64_t stride, int64_t columns, int64_t depth, Unit* panel) {
  constexpr int kStep = kLanes * kUnitDepth<Unit>;
  const int64_t units = (depth + kUnitDepth<Unit> - 1) / kUnitDepth<Unit>;
  for (int v = 0; v < kTileVectors; ++v) {
    for (int64_t d = 0, unit = 0; d < depth; d += kStep, unit += kLanes) {
      vfloat block[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t column = v * kLanes + i;
        block[i] = column < columns ? load_units<Unit>(from + column * stride + d, depth - d) : vfloat{};
      }
      transpose(block);
      const int64_t count = units - unit < kLanes ? units - unit : kLanes;
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(panel + (unit + i) * kTileColumns + v * kLanes, &block[i], sizeof(vfloat));
    }
  }
}

// Pack columns if rows of T in memory, `stride` apart, are steps of the depth.
template <typename Unit, typename T>
inline void pack_steps_of(const T* from, int64_t stride, int64_t columns, int64_t depth, Unit* panel) {
  for (int64_t d = 0; d < depth; d += kUnitDepth<Unit>, panel += kTileColumns) {
    for (int v = 0; v < kTileVectors; ++v) {
      const int64_t left = columns - v * kLanes;
      const int count = static_cast<int>(left < 0 ? 0 : left < kLanes ? left : kLanes);
      const T* first = from + d * stride + v * kLanes;
      vfloat units{};
      if constexpr (kUnitDepth<Unit> == 1) {
        if (count > 0) units = load(first, count);
      } else if constexpr (std::is_same_v<T, bfloat16_t>) {
        const bfloat16_t zeros[kLanes] = {};
        if (count > 0) units = bit_cast<vfloat>(pairs_of(first, d + 1 < depth ? first + stride : zeros, count));
      }
      std::memcpy(panel + v * kLanes, &units, sizeof(units));
    }
  }
}

// The update of a tile: c = sum or c += sum, after a multiplication by the factors, if any.
struct TileSums {
  bool add;
  const float* row_factor;     // null: 1
  const float* column_factor;  // kTileColumns numbers
};

// Return a vector of c after the update; `before` is its previous value.
inline vfloat finish_sums(vfloat before, vfloat sum, const TileSums& become, int64_t row, int64_t column) {
  if (become.row_factor) sum *= load(become.column_factor + column) * become.row_factor[row];
#if defined(FLASHINFER_AVX512)
  asm(""
      : "+v"(sum));  // rounds the product: otherwise the compiler may fuse it with the addition in one tile and not in
                     // another
#elif defined(FLASHINFER_NEON)
  asm("" : "+w"(sum));
#elif defined(FLASHINFER_AVX2)
  asm("" : "+x"(sum));
#endif
  return become.add ? before + sum : sum;
}

template <typename Unit, int kRows>
inline void multiply_tile(int64_t units, const Unit* __restrict a, int64_t a_stride, const Unit* __restrict panel,
                          float* __restrict c, int64_t c_stride, const TileSums& become) {
  vfloat sums[kRows][kTileVectors] = {};
  for (int64_t k = 0; k < units; ++k, panel += kTileColumns) {
    vfloat right[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) right[v] = load_raw<vfloat>(panel + v * kLanes);
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kTileVectors; ++v) sums[row][v] = add_product(sums[row][v], a[row * a_stride + k], right[v]);
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kTileVectors; ++v) {
      float* to = c + row * c_stride + v * kLanes;
      store(to, finish_sums(load(to), sums[row][v], become, row, v * kLanes));
    }
  }
}

// Multiply any number of rows by one panel.
template <typename Unit>
inline void multiply_rows(int64_t rows, int64_t units, const Unit* a, int64_t a_stride, const Unit* panel, float* c,
                          int64_t c_stride, TileSums become) {
  const auto advance = [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    multiply_tile<Unit, kRows>(units, a, a_stride, panel, c, c_stride, become);
    a += kRows * a_stride, c += kRows * c_stride, rows -= kRows;
    if (become.row_factor) become.row_factor += kRows;
  };
  while (rows >= kTileRows) advance(std::integral_constant<int, kTileRows>{});
  switch (rows) {
    case 5: return advance(std::integral_constant<int, 5>{});
    case 4: return advance(std::integral_constant<int, 4>{});
    case 3: return advance(std::integral_constant<int, 3>{});
    case 2: return advance(std::integral_constant<int, 2>{});
    case 1: return advance(std::integral_constant<int, 1>{});
    default: return;
  }
}

// Sums of few rows with kLanes columns that are rows of T in memory. Each element is read once, transposed in
// registers and multiplied there. Adds in the order of multiply_tile.
template <typename Unit, typename T>
inline void stream_columns(int64_t rows, const Unit* a, int64_t a_stride, const T* from, int64_t stride,
                           int64_t columns, int64_t depth, vfloat* sums) {
  constexpr int kStep = kLanes * kUnitDepth<Unit>,
                kAtOnce = 4;  // rows with independent sums, which hide the latency of an addition
  for (int64_t row = 0; row < rows; ++row) sums[row] = vfloat{};
  const T* at[kLanes];  // missing columns repeat the first
  for (int i = 0; i < kLanes; ++i) at[i] = from + (i < columns ? i : 0) * stride;
  for (int64_t d = 0; d < depth; d += kStep, a += kLanes) {
    vfloat block[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      __builtin_prefetch(at[i] + d + 4096 / sizeof(T), 0, 2);
      block[i] = load_units<Unit>(at[i] + d, depth - d);
    }
    transpose(block);
    // Elements after the depth are zero on both sides, and add nothing.
    int64_t row = 0;
    for (; row + kAtOnce <= rows; row += kAtOnce) {
      const Unit* left = a + row * a_stride;
      vfloat sum[kAtOnce];
      for (int r = 0; r < kAtOnce; ++r) sum[r] = sums[row + r];
      for (int i = 0; i < kLanes; ++i)
        for (int r = 0; r < kAtOnce; ++r) sum[r] = add_product(sum[r], left[r * a_stride + i], block[i]);
      for (int r = 0; r < kAtOnce; ++r) sums[row + r] = sum[r];
    }
    for (; row < rows; ++row)
      for (int i = 0; i < kLanes; ++i) sums[row] = add_product(sums[row], a[row * a_stride + i], block[i]);
  }
}

}  // namespace flashinfer::cpu
