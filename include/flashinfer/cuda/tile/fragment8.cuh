// Right operands of eight-bit elements in shared memory, widened to the 16-bit type of the left operand. A chunk of 16
// bytes has twice as many elements as ldmatrix takes it for, so that a lane's elements come in another order.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/ptx/ldmatrix.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// Where element d of a left operand must stand for RightRows8: the latter has four elements next to each other where
// RightRows has two and two.
__device__ __forceinline__ int place_in_8(int d) { return (d & ~15) + (d % 4 / 2) * 8 + d % 16 / 4 * 2 + d % 2; }

// Rows are columns of the result.
template <typename T, typename From, int kBytes>
struct RightRows8 {
  static_assert(sizeof(From) == 1, "elements have eight bits");
  using Rows = Swizzle<kBytes>;
  uint32_t at;

  __device__ __forceinline__ RightRows8(uint32_t start, int first_row)
      : at(Rows::row(start, first_row + threadIdx.x % 16)) {}
  // b[i] is of rows 16 pair + 8 i to + 7: elements 16 step + {0, 1, 2, 3} + 4 (lane % 4) of row lane / 4.
  __device__ __forceinline__ void load(uint32_t (&b)[2][2], int pair, int step) const {
    uint32_t r[2];
    ptx::ldmatrix_x2(r, Rows::chunk(at, step) + pair * 16 * kBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) b[i][0] = widen<T, From>(r[i]), b[i][1] = widen<T, From>(r[i] >> 16);
  }
};

// Rows are summed over.
template <typename T, typename From, int kBytes>
struct SummedRows8 {
  static_assert(sizeof(From) == 1, "elements have eight bits");
  using Rows = Swizzle<kBytes>;
  uint32_t at;

  __device__ __forceinline__ SummedRows8(uint32_t start, int first_row)
      : at(Rows::row(start, first_row + threadIdx.x % 16)) {}
  // Columns 16 pair to 16 pair + 15 of the result: b[0] has the even ones, b[1] the odd ones.
  __device__ __forceinline__ void load(uint32_t (&b)[2][2], int step, int pair) const {
    uint32_t r[2];
    // Of two rows: element 2 c and 2 c + 1 of the one, then of the other.
    ptx::ldmatrix_x2_trans(r, Rows::chunk(at, pair) + step * 16 * kBytes);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      b[0][part] = widen<T, From>(__byte_perm(r[part], 0, 0x4420));
      b[1][part] = widen<T, From>(__byte_perm(r[part], 0, 0x4431));
    }
  }
};

}  // namespace flashinfer::cuda
