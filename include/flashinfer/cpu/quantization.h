// Booleans packed into bits on the CPU.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/quantization.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

#if defined(__AVX2__)
// Pack 32 booleans at a time and return their number; a rest remains. movemask puts the first byte into the
// lowest bit, so the other order reverses the bytes of each eight.
inline int64_t pack_blocks(const uint8_t* x, int64_t n, uint8_t* packed, bool big) {
  const __m256i reversed = _mm256_set1_epi64x(0x0001020304050607ll), high = _mm256_set1_epi64x(0x08090a0b0c0d0e0fll);
  const __m256i order = _mm256_unpacklo_epi64(reversed, high);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    if (big) bytes = _mm256_shuffle_epi8(bytes, order);
    const uint32_t bits =
        ~static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
    std::memcpy(packed + i / 8, &bits, 4);
  }
  return i;
}
#else
inline int64_t pack_blocks(const uint8_t*, int64_t, uint8_t*, bool) { return 0; }
#endif

// Pack the n booleans at x into ceil(n / 8) bytes.
inline void pack_run(const uint8_t* x, int64_t n, uint8_t* packed, uint64_t factor) {
  int64_t i = pack_blocks(x, n, packed, factor == kBigFactor);
  for (; i < n; i += 8) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, x + i, n - i < 8 ? n - i : 8);
    packed[i / 8] = pack8(bytes, factor);
  }
}

inline void pack_bits(const PackParams& p) {
  parallel_for(p.num_bytes, kGrainBytes / 8, [&](int64_t first, int64_t last) {
    pack_run(p.x + first * 8, std::min(p.n, last * 8) - first * 8, p.packed + first, p.factor);
  });
}

inline void segment_pack_bits(const SegmentPackParams& p) {
  const auto refuse = [](int64_t i, int64_t got, int64_t low, int64_t high) {
    throw_value_error("segment_packbits: indptr[" + std::to_string(i) + "]: got " + std::to_string(got) + ", wanted " +
                      std::to_string(low) + " to " + std::to_string(high));
  };
  int64_t low = 0;
  for (int64_t i = 0; i <= p.num_segments; ++i) {
    if (p.indptr[i] < low || p.indptr[i] > p.pack.n) refuse(i, p.indptr[i], low, p.pack.n);
    low = p.indptr[i];
  }
  p.packed_indptr[0] = 0;
  for (int64_t i = 0; i < p.num_segments; ++i) {
    p.packed_indptr[i + 1] = p.packed_indptr[i] + (int64_t{p.indptr[i + 1]} - p.indptr[i] + 7) / 8;
  }
  const int64_t total = p.packed_indptr[p.num_segments];
  if (total < p.pack.num_bytes) std::memset(p.pack.packed + total, 0, p.pack.num_bytes - total);
  parallel_for(total, kGrainBytes / 8, [&](int64_t first, int64_t last) {
    const int32_t* ends = p.packed_indptr + 1;
    for (int64_t i = std::upper_bound(ends, ends + p.num_segments, first) - ends; first < last; ++i) {
      const int64_t stop = std::min<int64_t>(last, ends[i]), start = p.indptr[i] + (first - p.packed_indptr[i]) * 8;
      pack_run(p.pack.x + start, std::min<int64_t>(p.indptr[i + 1] - start, (stop - first) * 8), p.pack.packed + first,
               p.pack.factor);
      first = stop;
    }
  });
}

}  // namespace flashinfer::cpu
