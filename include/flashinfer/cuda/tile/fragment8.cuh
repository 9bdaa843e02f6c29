// Operand B with 8-bit elements in smem, widened to the 16-bit type of operand A. A 16-byte chunk has twice
// as many elements as ldmatrix assumes, which changes the order of a lane's elements.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/ptx/ldmatrix.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// Return the position of element d of operand A for SmemOperandB8. A lane has four adjacent elements of a
// row, instead of two pairs as in SmemOperandB.
__device__ __forceinline__ int position_in_8(int d) { return (d & ~15) + (d % 4 / 2) * 8 + d % 16 / 4 * 2 + d % 2; }

// Operand B, K-major: a row of smem is a column n of the result.
template <typename T, typename From, int kBytes>
struct SmemOperandB8 {
  static_assert(sizeof(From) == 1, "elements have eight bits");
  using Rows = Swizzle<kBytes>;
  uint32_t at;

  __device__ __forceinline__ SmemOperandB8(uint32_t start, int first_row)
      : at(Rows::row(start, first_row + threadIdx.x % 16)) {}
  // Load rows 16 pair + 8 i to + 7 to b[i]: elements 16 step + {0, 1, 2, 3} + 4 (lane % 4) of row lane / 4.
  __device__ __forceinline__ void load(uint32_t (&b)[2][2], int pair, int step) const {
    uint32_t r[2];
    ptx::ldmatrix_x2(r, Rows::chunk(at, step) + pair * 16 * kBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i][0] = widen<T, From>(r[i]), b[i][1] = widen<T, From>(r[i] >> 16);
  }
};

// Operand B, N-major: a row of smem is an index k.
template <typename T, typename From, int kBytes>
struct SmemOperandBTransposed8 {
  static_assert(sizeof(From) == 1, "elements have eight bits");
  using Rows = Swizzle<kBytes>;
  uint32_t at;

  __device__ __forceinline__ SmemOperandBTransposed8(uint32_t start, int first_row)
      : at(Rows::row(start, first_row + threadIdx.x % 16)) {}
  // Load columns 16 pair to 16 pair + 15 of the result: the even ones to b[0], the odd ones to b[1].
  __device__ __forceinline__ void load(uint32_t (&b)[2][2], int step, int pair) const {
    uint32_t r[2];
    // Two rows: elements 2 c and 2 c + 1 of the first, then of the second.
    ptx::ldmatrix_x2_trans(r, Rows::chunk(at, pair) + step * 16 * kBytes);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      b[0][part] = widen<T, From>(__byte_perm(r[part], 0, 0x4420));
      b[1][part] = widen<T, From>(__byte_perm(r[part], 0, 0x4431));
    }
  }
};

}  // namespace flashinfer::cuda
