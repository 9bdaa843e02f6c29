// Rows of a strided tensor [..., n] whose last dimension is contiguous, reduced to at most two leading dimensions.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHINFER_HD __host__ __device__ __forceinline__
#else
#define FLASHINFER_HD inline
#endif

namespace flashinfer {

struct Rows {
  int64_t inner;                       // rows per step of the outer dimension
  int64_t outer_stride, inner_stride;  // in elements

  FLASHINFER_HD int64_t offset(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

}  // namespace flashinfer
