// Division by a number known before the launch: one multiplication and one shift.
#pragma once

#include <cstdint>

#include <flashinfer/common/rows.h>

namespace flashinfer {

// Exact for 0 <= n < 2^31 and 1 <= divisor < 2^31. The multiplier is ceil(2^shift / divisor), with shift = 31
// + log2 rounded up. Its error is less than divisor / 2^shift <= 2^-31, so n times the error stays below 1 /
// divisor.
struct FastDiv {
  uint32_t divisor = 1, multiplier = 1u << 31, shift = 31;

  FastDiv() = default;
  explicit FastDiv(uint32_t by) : divisor(by) {
    while (shift < 62 && (uint64_t{1} << (shift - 31)) < by) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by);
  }

  FLASHINFER_HD uint32_t div(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> shift);
  }
  FLASHINFER_HD void divmod(uint32_t n, uint32_t& quotient, uint32_t& remainder) const {
    quotient = div(n), remainder = n - quotient * divisor;
  }
};

}  // namespace flashinfer
