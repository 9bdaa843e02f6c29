// Booleans packed into bits, in both orders, as one run and by segments.
#include <flashinfer/cpu/quantization.h>

#include "harness.h"

using namespace driver;

int bit(const std::vector<uint8_t>& packed, int64_t first_byte, int64_t i, bool big) {
  const int shift = static_cast<int>(big ? 7 - i % 8 : i % 8);
  return packed[first_byte + i / 8] >> shift & 1;
}

void run() {
  for (const bool big : {false, true}) {
    for (const int n : {0, 1, 8, 31, 32, 33, 1000}) {
      std::vector<uint8_t> x(n + 1);
      for (uint8_t& one : x) one = static_cast<uint8_t>(drawn_int(0, 1) * drawn_int(1, 255));
      const int64_t bytes = (n + 7) / 8;
      std::vector<uint8_t> packed(bytes + 1, 0xa5);
      PackParams p{x.data(), packed.data(), n, bytes, big ? kBigFactor : kLittleFactor};
      cpu::pack_bits(p);
      for (int i = 0; i < n; ++i) check("packbits", i, bit(packed, 0, i, big), x[i] != 0, 0);
      check("behind", bytes, packed[bytes], 0xa5, 0);

      const std::vector<int32_t> indptr = {0, n / 3, n / 3, n};
      std::vector<int32_t> starts(4, -1);
      packed.assign(bytes + 3, 0xa5);
      p.packed = packed.data(), p.num_bytes = bytes + 3;
      cpu::segment_pack_bits({p, indptr.data(), starts.data(), 3});
      for (int segment = 0; segment < 3; ++segment) {
        const int length = indptr[segment + 1] - indptr[segment];
        check("packed_indptr", segment, starts[segment + 1] - starts[segment], (length + 7) / 8, 0);
        for (int i = 0; i < length; ++i)
          check("segment_packbits", i, bit(packed, starts[segment], i, big), x[indptr[segment] + i] != 0, 0);
      }
    }
  }
}
