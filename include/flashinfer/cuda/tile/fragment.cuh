// Operands and accumulators of mma.m16n8k16: C[m][n] += sum over k of A[m][k] B[n][k].
//
// Element i of an accumulator's 16 x 8 tile has row 8 (i / 2) + lane / 4 and column 2 (lane % 4) + i % 2.
// Two adjacent tiles, rounded to 16 bits, have the register layout of operand A of the next product.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/ptx/ldmatrix.cuh>
#include <flashinfer/cuda/ptx/mma.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kIsHalfType<T>, "products are of half_t or of bfloat16_t");
  if constexpr (__is_same(T, bfloat16_t)) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
}

// A warp's sums of kRows x kColumns.
template <int kRows, int kColumns>
struct Accumulator {
  static constexpr int kM = kRows / 16, kN = kColumns / 8;
  static_assert(kRows % 16 == 0 && kColumns % 16 == 0, "an accumulator consists of pairs of 16 x 8 tiles");
  float tile[kM][kN][4];

  __device__ __forceinline__ float (&operator[](int m)) [kN][4] { return tile[m]; } __device__ __forceinline__ const
      float (&operator[](int m) const)[kN][4] {
    return tile[m];
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) tile[m][n][0] = tile[m][n][1] = tile[m][n][2] = tile[m][n][3] = 0;
    }
  }

  __device__ __forceinline__ void scale(float by) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[m][n][i] *= by;
      }
    }
  }

  // Add the product of 16 elements of every row with those of columns 16 * pair to 16 * pair + 15.
  template <typename T>
  __device__ __forceinline__ void add(const uint32_t (&a)[kM][4], const uint32_t (&b)[2][2], int pair) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      mma<T>(tile[m][2 * pair], a[m], b[0][0], b[0][1]);
      mma<T>(tile[m][2 * pair + 1], a[m], b[1][0], b[1][1]);
    }
  }
};

// Operand A of kRows x kDepth in registers. tile[step] has elements 16 step to 16 step + 15 of all rows.
template <int kRows, int kDepth>
struct RegisterOperandA {
  static_assert(kRows % 16 == 0 && kDepth % 16 == 0, "operand A consists of 16 x 16 tiles");
  uint32_t tile[kDepth / 16][kRows / 16][4];

  __device__ __forceinline__ uint32_t (&operator[](int step)) [kRows / 16][4] {
    return tile[step];
  } __device__ __forceinline__ const uint32_t (&operator[](int step) const)[kRows / 16][4] {
    return tile[step];
  }
};

// Operand A in smem, with rows of kBytes: the ldmatrix address of a lane. `offset` selects another tile with
// rows of the same length, so both tiles share one address.
template <int kBytes>
struct SmemOperandA {
  uint32_t at;

  __device__ __forceinline__ SmemOperandA(uint32_t start, int first_row) {
    const int lane = threadIdx.x % 32;
    at = Swizzle<kBytes>::chunk(Swizzle<kBytes>::row(start, first_row + lane % 16), lane / 16);
  }
  // Load rows 16 m to 16 m + 15, elements 16 step to 16 step + 15.
  __device__ __forceinline__ void load(uint32_t (&a)[4], int m, int step, int offset = 0) const {
    ptx::ldmatrix_x4(a, Swizzle<kBytes>::chunk(at, 2 * step) + (m * 16 * kBytes + offset));
  }
};

// Operand B in smem, K-major: a row of smem is a column n of the result, and its elements are k.
template <int kBytes, int kLineRows = 0>
struct SmemOperandB {
  using Rows = Swizzle<kBytes, kLineRows>;
  uint32_t at;

  __device__ __forceinline__ SmemOperandB(uint32_t start, int first_row) {
    const int lane = threadIdx.x % 32;
    at = Rows::chunk(Rows::row(start, first_row + lane % 8 + lane / 16 * 8), lane / 8 % 2);
  }
  // Load rows 16 pair + 8 i to + 7 to b[i]: elements 16 step + {0, 1, 8, 9} + 2 (lane % 4) of row lane / 4.
  __device__ __forceinline__ void load(uint32_t (&b)[2][2], int pair, int step, int offset = 0) const {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, Rows::chunk(at, 2 * step) + (pair * 16 * Rows::kPitch + offset));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  }
};

// Operand B in smem, N-major: a row of smem is an index k, and its elements are columns n of the result.
template <int kBytes, int kLineRows = 0>
struct SmemOperandBTransposed {
  using Rows = Swizzle<kBytes, kLineRows>;
  uint32_t at;

  __device__ __forceinline__ SmemOperandBTransposed(uint32_t start, int first_row)
      : at(Rows::chunk(Rows::row(start, first_row + threadIdx.x % 16), threadIdx.x % 32 / 16)) {}
  // Return the operand that starts `rows` rows later. `rows` is a multiple of 16.
  __device__ __forceinline__ SmemOperandBTransposed below(int rows) const {
    SmemOperandBTransposed result(*this);
    result.at += rows * Rows::kPitch;
    return result;
  }
  // Load columns 8 (chunk + i) to + 7 of the result to b[i], from rows 16 step to 16 step + 15.
  __device__ __forceinline__ void load(uint32_t (&b)[2][2], int step, int chunk, int offset = 0) const {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, Rows::chunk(at, chunk) + (step * 16 * Rows::kPitch + offset));
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  }
};

}  // namespace flashinfer::cuda
