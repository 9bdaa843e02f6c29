// Grouped GEMM of 16-bit rows and MXFP4 matrices: layouts of codes and scales, and the kernel's parameters.
//
// An MXFP4 matrix has codes of e2m1 and one scale of e8m0 for each 32 elements of k:
//   b[n][k] = value(code[n][k]) * 2^(scale[n][k / 32] - 127), a scale of 255 is NaN
//
// Codes are interleaved so that a kernel expands two with one shift and one mask. A word has the codes of
// elements 8 i to 8 i + 7 of a row. Its low half has the elements 0, 2, 4, 6 and its high half 1, 3, 5, 7. The
// bits of a half, from the highest:
//   15: sign of the first; 14, 13: sign and upper exponent bit of the fourth; 12: sign of the second;
//   11, 10: the other bits of the fourth; 9: sign of the third; 8 to 6, 5 to 3, 2 to 0: magnitudes of the
//   first, second and third.
// The second and third are the first, shifted by 3 and 6. The bits of the first are those of a bfloat16 with
// an exponent that is 126 too small.
//
// Scales are stored by blocks of 64 rows of a matrix and 128 elements of k: [n / 64][k / 128][64][4].
#pragma once

#include <cstring>

#include <flashinfer/common/gemm.h>

namespace flashinfer {

constexpr int kMxfp4Group = 32, kMxfp4Depth = 128, kMxfp4Rows = 64;  // elements of a scale; sizes of a block

// `b` has the interleaved codes [num_matrices, n, k / 2]. The strides of b, its type and its scales as floats
// are unused. k is a multiple of 128, and n of 64. The output has the type of a.
struct Mxfp4GemmParams : GemmParams {
  const uint8_t* scales;  // [num_matrices, n / 64, k / 128, 64, 4]

  FLASHINFER_HD const uint8_t* codes_of(int64_t matrix, int64_t row) const {
    return static_cast<const uint8_t*>(b) + (matrix * n + row) * (k / 2);
  }
  // Return the scales of the first 128 elements of a row. Those of the next 128 are 256 bytes later.
  FLASHINFER_HD const uint8_t* scales_of(int64_t matrix, int64_t row) const {
    return scales + matrix * n * (k / kMxfp4Group) + row / kMxfp4Rows * kMxfp4Rows * (k / kMxfp4Group) +
           row % kMxfp4Rows * 4;
  }
};

// Return the bits of a scale as float32.
FLASHINFER_HD uint32_t mxfp4_scale_bits(uint32_t scale) {
  return scale == 0 ? 0x00400000u : scale == 255 ? 0x7fc00000u : scale << 23;
}

void mxfp4_gemm(const Mxfp4GemmParams& params, const Launch& launch);

}  // namespace flashinfer
