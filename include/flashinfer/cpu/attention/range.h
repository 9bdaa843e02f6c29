// The visible keys of a block: a range, and bits of a custom mask.
#pragma once

#include <cstdint>

#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// The keys of a block that a row sees, numbered in the block.
struct Range {
  int32_t begin, end;

  bool empty() const { return begin >= end; }
};

// Return the lanes of keys [t, t + kLanes) of a block that a custom mask shows. `first`: the row's mask bit
// of the block's first key. Read no byte after the last bit of the range.
inline vint visible_lanes(const uint8_t* mask, int64_t first, int t, Range range) {
  const int64_t byte = (first + t) >> 3, last = (first + range.end - 1) >> 3;
  uint32_t word = 0;
  for (int i = 0; i <= (kLanes + 7) / 8; ++i)
    if (byte + i <= last) word |= static_cast<uint32_t>(mask[byte + i]) << 8 * i;
  vuint lane_bits;
  for (int lane = 0; lane < kLanes; ++lane) lane_bits[lane] = 1u << lane;
  return ((vuint{} + (word >> ((first + t) & 7))) & lane_bits) != 0;
}

}  // namespace flashinfer::cpu
