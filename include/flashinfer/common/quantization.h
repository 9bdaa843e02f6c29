// Booleans packed into bits: parameters of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include <flashinfer/common/rows.h>

namespace flashinfer {

// Pack eight bytes into eight bits of one byte; a nonzero byte is true.
//
// Every byte becomes 0 or 1. One product then moves all eight: the factor has one bit per byte, which shifts
// it to its bit of the topmost byte. No two of the 64 partial products overlap, so nothing carries.
FLASHINFER_HD uint8_t pack8(uint64_t bytes, uint64_t factor) {
  constexpr uint64_t kLow7 = 0x7f7f7f7f7f7f7f7full;
  const uint64_t ones = (((bytes & kLow7) + kLow7) | bytes) >> 7 & 0x0101010101010101ull;
  return static_cast<uint8_t>(ones * factor >> 56);
}

constexpr uint64_t kBigFactor = 0x8040201008040201ull;     // the first boolean is the highest bit
constexpr uint64_t kLittleFactor = 0x0102040810204080ull;  // the first boolean is the lowest bit

struct PackParams {
  const uint8_t* x;
  uint8_t* packed;
  int64_t n;          // booleans
  int64_t num_bytes;  // of `packed`
  uint64_t factor;
};

// Segments [indptr[i], indptr[i + 1]) of x, each padded to whole bytes. The kernel also writes packed_indptr.
// Bytes of `packed` after the last segment become 0.
struct SegmentPackParams {
  PackParams pack;
  const int32_t* indptr;   // [num_segments + 1]
  int32_t* packed_indptr;  // [num_segments + 1]
  int64_t num_segments;
};

struct Launch;
void pack_bits(const PackParams& params, const Launch& launch);
void segment_pack_bits(const SegmentPackParams& params, const Launch& launch);

}  // namespace flashinfer
