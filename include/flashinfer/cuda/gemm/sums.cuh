// Accumulators of a tile: of tensor cores, or of FMA instructions for float32.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/gemm/shape.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>

namespace flashinfer::cuda {

// Part of a tile that a warp computes.
template <typename Shape>
struct TensorSums {
  static constexpr int kM = Shape::kWarpRows / 16, kN = Shape::kWarpColumns / 8;
  using S = typename Shape::S;
  Accumulator<Shape::kWarpRows, Shape::kWarpColumns> c;

  __device__ __forceinline__ static int first_row() {
    return static_cast<int>(threadIdx.x) / 32 / Shape::kWarpsAcross * Shape::kWarpRows;
  }
  __device__ __forceinline__ static int first_column() {
    return static_cast<int>(threadIdx.x) / 32 % Shape::kWarpsAcross * Shape::kWarpColumns;
  }

  __device__ __forceinline__ void clear() { c.clear(); }

  __device__ __forceinline__ void multiply(uint32_t stage) {
    const SmemOperandA<Shape::kARowBytes> left(stage + Shape::kAAt, first_row());
    const SmemOperandB<Shape::kBRowBytes> columns(stage + Shape::kBAt, first_column());
    const SmemOperandBTransposed<Shape::kBRowBytes> steps(stage + Shape::kBAt, 0);
#pragma unroll
    for (int step = 0; step < Shape::kDepth / 16; ++step) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) left.load(a[m], m, step);
#pragma unroll
      for (int pair = 0; pair < kN / 2; ++pair) {
        uint32_t b[2][2];
        if constexpr (Shape::kKMajor) {
          columns.load(b, pair, step);
        } else {
          steps.load(b, step, first_column() / 8 + 2 * pair);
        }
        c.template add<S>(a, b, pair);
      }
    }
  }

  // Call body(row, column, i, j): sums i and j are adjacent, in columns `column` and column + 1.
  template <typename Body>
  __device__ __forceinline__ void for_pairs(const Body& body) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          body(first_row() + m * 16 + half * 8 + lane / 4, first_column() + n * 8 + lane % 4 * 2, c[m][n][2 * half],
               c[m][n][2 * half + 1]);
      }
    }
  }

  // this += part * factors
  __device__ __forceinline__ void add(TensorSums& part, uint32_t factors) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float rows[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[m][half] = ptx::load_shared_float(factors + (first_row() + m * 16 + half * 8 + lane / 4) * 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t at = factors + (128 + first_column() + n * 8 + lane % 4 * 2) * 4;
      const float columns[2] = {ptx::load_shared_float(at), ptx::load_shared_float(at + 4)};
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[m][n][i] += part.c[m][n][i] * (rows[m][i / 2] * columns[i % 2]);
    }
  }
};

// 16 x 16 threads: rows y, y + 16, ... and pairs of columns 2 x, 2 x + 32, ...
template <typename Shape>
struct FloatSums {
  static constexpr int kM = Shape::kRows / 16, kN = Shape::kColumns / 32;
  float c[kM][kN][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) c[m][n][0] = c[m][n][1] = 0;
  }

  template <int kBytes>
  __device__ __forceinline__ static float number(uint32_t start, int row, int at) {
    return ptx::load_shared_float(Swizzle<kBytes>::chunk(Swizzle<kBytes>::row(start, row), at / 4) + at % 4 * 4);
  }

  __device__ __forceinline__ void multiply(uint32_t stage) {
    const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll 4
    for (int k = 0; k < Shape::kDepth; ++k) {
      float left[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) left[m] = number<Shape::kARowBytes>(stage + Shape::kAAt, y + 16 * m, k);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 2 * x + i + 32 * n;
          const float right = Shape::kKMajor ? number<Shape::kBRowBytes>(stage + Shape::kBAt, column, k)
                                             : number<Shape::kBRowBytes>(stage + Shape::kBAt, k, column);
#pragma unroll
          for (int m = 0; m < kM; ++m) c[m][n][i] = fmaf(left[m], right, c[m][n][i]);
        }
      }
    }
  }

  template <typename Body>
  __device__ __forceinline__ void for_pairs(const Body& body) {
    const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kN; ++n) body(y + 16 * m, 2 * x + 32 * n, c[m][n][0], c[m][n][1]);
  }
};

}  // namespace flashinfer::cuda
