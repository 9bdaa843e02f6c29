// Rows of a strided tensor [..., n] with a contiguous last dimension, in at most three leading dimensions.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHINFER_HD __host__ __device__ __forceinline__
#else
#define FLASHINFER_HD inline
#endif

namespace flashinfer {

struct Rows {
  int64_t inner, middle;                              // sizes; the outer size is implied
  int64_t outer_stride, middle_stride, inner_stride;  // in elements

  // Most tensors have one leading dimension, and a division takes a GPU as long as a load.
  FLASHINFER_HD int64_t offset(int64_t row) const {
    if (row < inner) return row * inner_stride;
    const int64_t next = row / inner, at = (row - next * inner) * inner_stride;
    if (next < middle) return at + next * middle_stride;
    return at + next / middle * outer_stride + next % middle * middle_stride;
  }
};

}  // namespace flashinfer
