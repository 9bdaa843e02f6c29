// Sums over a row whose bits depend on the row only: not on the batch, grid, cluster or threads.
//
// A row is cut into chunks of 512. Within a chunk, floats are added by halving: 256 sums of elements 256
// apart, then 128 sums of sums 128 apart, and so on. Sums of chunks are added as integers, so their order is
// irrelevant.
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

// Fixed point for chunk sums up to `largest`. Each takes less than 48 bits, and 2^15 of them fit into 63.
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
    // Round to nearest even without a call: the result is the low bits of a sum whose last bit weighs 1.
    const double raised = value * up + 0x1.8p52;
    uint64_t bits;
    memcpy(&bits, &raised, sizeof(bits));
    return bits - 0x4338000000000000u;
#endif
  }

  FLASHINFER_HD double real(uint64_t sum) const { return static_cast<double>(sum) * down; }
};

// Return true if t is the largest threshold whose kept elements sum to `target` or more. `sum` is the sum of
// all elements >= t, and `edges` the sum of those equal to t. Each of the latter changes a chunk's sum by its
// value and by a rounding error below 2^-19 of the largest chunk.
FLASHINFER_HD bool is_threshold(double sum, double edges, float t, double target, FixedPoint fixed) {
  const double rounding = fmin(edges / t * fixed.down * 0x1p48, sum) * 0x1p-19;
  return sum >= target && sum - edges + rounding < target;
}

// x / sum in float. Sums below 2^-60 are scaled up first, so that their inverse is a float.
struct Normalizer {
  float up, inverse;

  FLASHINFER_HD static Normalizer of(double sum) {
    const double up = sum < 0x1p-60 ? 0x1p80 : 1.0;
    return {static_cast<float>(up), static_cast<float>(1.0 / (sum * up))};
  }

  FLASHINFER_HD float operator()(float x) const { return x * up * inverse; }
};

// Return floor(u * total) with u = uniform * 2^-53.
FLASHINFER_HD uint64_t share_of(uint64_t uniform, uint64_t total) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(uniform << 11, total);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(uniform) * total >> 53);
#endif
}

}  // namespace flashinfer
