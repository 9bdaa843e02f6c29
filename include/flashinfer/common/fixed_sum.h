// Sums over a row whose bits depend on the row alone: not on the batch, the grid, the cluster or the threads.
//
// A row is cut into chunks of 512. Within a chunk elements are added in float by halving: 256 sums of elements 256
// apart, then 128 sums of those 128 apart, and so on. Sums of chunks are added as integers, which no order changes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <flashinfer/common/rows.h>

namespace flashinfer {

constexpr int kSumChunk = 512;

FLASHINFER_HD int64_t num_chunks(int64_t n) { return (n + kSumChunk - 1) / kSumChunk; }

FLASHINFER_HD double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Fixed point for sums of chunks up to `largest`: each takes less than 48 bits, and 2^15 of them fit into 63.
struct FixedPoint {
  double up, down;

  FLASHINFER_HD static FixedPoint of(float largest) {
    uint32_t bits;
    memcpy(&bits, &largest, sizeof(bits));
    const int exponent = static_cast<int>(bits >> 23 & 255u) - 127;
    return {power_of_two(47 - exponent), power_of_two(exponent - 47)};
  }

  FLASHINFER_HD uint64_t operator()(float value) const {
#if defined(__CUDA_ARCH__)
    return static_cast<uint64_t>(__double2ll_rn(value * up));
#else
    // The same, ties to even, without a call: the low bits of a sum whose last bit is 1.
    const double raised = value * up + 0x1.8p52;
    uint64_t bits;
    memcpy(&bits, &raised, sizeof(bits));
    return bits - 0x4338000000000000u;
#endif
  }

  FLASHINFER_HD double real(uint64_t sum) const { return static_cast<double>(sum) * down; }
};

// Whether sums of what is kept say that t is the largest number from which on there is `wanted`, where elements that
// are t have the sum `edges`. Each of those changes a chunk's sum by itself and by less than 2^-19 of the largest
// chunk.
FLASHINFER_HD bool is_threshold(double kept, double edges, float t, double wanted, FixedPoint fixed) {
  const double rounding = fmin(edges / t * fixed.down * 0x1p48, kept) * 0x1p-19;
  return kept >= wanted && kept - edges + rounding < wanted;
}

// x / sum as kernels compute it. Sums below 2^-60 are raised first, so that their inverse is a float.
struct Normalizer {
  float up, inverse;

  FLASHINFER_HD static Normalizer of(double sum) {
    const double up = sum < 0x1p-60 ? 0x1p80 : 1.0;
    return {static_cast<float>(up), static_cast<float>(1.0 / (sum * up))};
  }

  FLASHINFER_HD float operator()(float x) const { return x * up * inverse; }
};

// floor(u * total) for u = uniform * 2^-53.
FLASHINFER_HD uint64_t share_of(uint64_t uniform, uint64_t total) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(uniform << 11, total);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(uniform) * total >> 53);
#endif
}

}  // namespace flashinfer
