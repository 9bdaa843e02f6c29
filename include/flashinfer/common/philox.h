// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). A random block is a
// pure function of a key and a counter, so draws have no state and no order.
#pragma once

#include <cstdint>

#include <flashinfer/common/rows.h>

namespace flashinfer {

struct PhiloxBlock {
  uint32_t words[4];
};

FLASHINFER_HD PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key_low, uint32_t key_high, int rounds) {
  uint32_t* c = counter.words;
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t first = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key_low;
    const uint32_t third = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key_high;
    c[0] = first, c[1] = static_cast<uint32_t>(b), c[2] = third, c[3] = static_cast<uint32_t>(a);
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
  return counter;
}

FLASHINFER_HD PhiloxBlock philox4x32_10(PhiloxBlock counter, uint32_t key_low, uint32_t key_high) {
  return philox4x32(counter, key_low, key_high, 10);
}

// Return 53 uniform bits: u = result * 2^-53 lies in [0, 1). The counter's words are offset, row and draw.
FLASHINFER_HD uint64_t uniform53(uint64_t seed, uint64_t offset, uint32_t row, uint32_t draw) {
  const PhiloxBlock counter{{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), row, draw}};
  const PhiloxBlock r = philox4x32_10(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return (uint64_t{r.words[1]} << 32 | r.words[0]) >> 11;
}

}  // namespace flashinfer
