// Register layout of the recurrent kernel: eight threads share four columns of a state, and each has an
// eighth of the rows. A thread reads an element of q or k from smem once for four columns. With fewer columns
// per thread, smem reads would bound the kernel.
#pragma once

#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

// Part p of eight has rows 32 j + 4 p to 32 j + 4 p + 3 for each j.
template <int kRows>
struct DeltaPanel {
  static constexpr int kParts = 8, kColumns = 4;
  static_assert(kRows % 4 == 0, "rows are read by 16 bytes");

  float at[kColumns][kRows];

  static __device__ __forceinline__ int part() { return static_cast<int>(threadIdx.x) % kParts; }
  // Return the first column of this thread.
  static __device__ __forceinline__ int column() { return static_cast<int>(threadIdx.x) / kParts * kColumns; }
  // Eight threads share eight products, with k and with q for each of four columns. A thread receives one of
  // them: product_column() is its column, and is_query_product() is true for a product with q.
  static __device__ __forceinline__ int product_column() { return column() + part() % kColumns; }
  static __device__ __forceinline__ bool is_query_product() { return part() >= kColumns; }
  // Return the row of the state that element i holds.
  static __device__ __forceinline__ int row(int i) { return i / 4 * 32 + part() * 4 + i % 4; }

  // Load this thread's elements of a row in smem.
  static __device__ __forceinline__ void load_row(const float* from, float (&to)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + row(i));
      to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
  }

  // Compute the products of all columns with k and with q. Each of the eight threads returns one of them.
  __device__ __forceinline__ float products(const float (&k)[kRows], const float (&q)[kRows]) const {
    float sums[2 * kColumns] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums[c] = fmaf(at[c][i], k[i], sums[c]);
        sums[kColumns + c] = fmaf(at[c][i], q[i], sums[kColumns + c]);
      }
    }
    scattered_lane_sums<kParts, 2 * kColumns>(sums);
    return sums[0];
  }
  // Return `value` of the thread that has the product of column c with k.
  static __device__ __forceinline__ float of_column(float value, int c) {
    return __shfl_sync(kAllLanes, value, c, kParts);
  }

  __device__ __forceinline__ void scale(float factor) {
    scale_rows([factor](int) { return factor; });
  }
  // Multiply row i by factor(i).
  template <typename Factor>
  __device__ __forceinline__ void scale_rows(const Factor& factor) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) at[c][i] *= factor(i);
    }
  }
  // Add k u' to the state.
  __device__ __forceinline__ void add(const float (&k)[kRows], const float (&u)[kColumns]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) at[c][i] = fmaf(k[i], u[c], at[c][i]);
    }
  }

  // Load from and store to the CTA's columns in smem.
  template <typename Columns>
  __device__ __forceinline__ void load_from(const Columns& from) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) at[c][i] = from.at[row(i)][column() + c];
    }
  }
  template <typename Columns>
  __device__ __forceinline__ void store_to(Columns& to) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) to.at[row(i)][column() + c] = at[c][i];
    }
  }
};

}  // namespace flashinfer::cuda
