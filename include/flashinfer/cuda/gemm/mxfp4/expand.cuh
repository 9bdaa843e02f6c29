// Expansion of interleaved MXFP4 codes (common/mxfp4_gemm.h) to pairs of 16-bit numbers in registers.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include <flashinfer/common/mxfp4_gemm.h>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

// Numbers of type T that have the bits of a code, each kFactor times too small. For half_t, the smallest
// is the subnormal 2^-15. mma reads it exactly, and float sums do not underflow, so the result is multiplied by
// kFactor. Sums of bfloat16_t would underflow, so its pairs are multiplied here.
template <typename T>
struct Mxfp4Pairs {
  static constexpr float kFactor = 16384.0f;  // 2^14
  __device__ __forceinline__ static void expand(uint32_t word, uint32_t (&pair)[4]) {
    constexpr uint32_t kSigns = 0x80008000, kMagnitudes = 0x0e000e00;
    const uint32_t by_3 = word << 3, by_6 = word << 6;
    pair[0] = (word & kSigns) | (by_3 & kMagnitudes);
    pair[1] = (by_3 & kSigns) | (by_6 & kMagnitudes);
    pair[2] = (by_6 & kSigns) | (word << 9 & kMagnitudes);
    pair[3] = (word << 1 & kSigns) | (word >> 2 & 0x08000800) | (word >> 1 & 0x06000600);
  }
};

template <>
struct Mxfp4Pairs<bfloat16_t> {
  static constexpr float kFactor = 1.0f;
  __device__ __forceinline__ static void expand(uint32_t word, uint32_t (&pair)[4]) {
    constexpr uint32_t kPairMask = 0x81c081c0;
    pair[0] = word & kPairMask, pair[1] = word << 3 & kPairMask, pair[2] = word << 6 & kPairMask;
    pair[3] = (word << 1 & 0x80008000) | (word >> 5 & 0x01000100) | (word >> 4 & 0x00c000c0);
    const __nv_bfloat162 factor = __bfloat162bfloat162(__ushort_as_bfloat16(0x7e80));  // 2^126
#pragma unroll
    for (uint32_t& one : pair) {
      __nv_bfloat162 numbers;
      memcpy(&numbers, &one, 4);
      numbers = __hmul2(numbers, factor);
      memcpy(&one, &numbers, 4);
    }
  }
};

// Return the scale in the low byte of a word: infinity for NaN, and 0 for 2^-127, which is subnormal.
__device__ __forceinline__ float mxfp4_scale(uint32_t word) { return __uint_as_float(word << 23 & 0x7f800000u); }

}  // namespace flashinfer::cuda
