// Concatenation of MLA's keys on the CPU. Each thread writes the keys of a range of tokens.
#pragma once

#include <cstring>

#include <flashinfer/common/concat_ops.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

inline void concat_mla_k(const ConcatMlaParams& p) {
  parallel_rows(p.tokens, p.heads * (p.nope_bytes + p.rope_bytes), [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const char* rope = p.rope + token * p.rope_token_stride;
      for (int64_t head = 0; head < p.heads; ++head) {
        char* k = p.k + token * p.k_token_stride + head * p.k_head_stride;
        std::memcpy(k, p.nope + token * p.nope_token_stride + head * p.nope_head_stride, p.nope_bytes);
        std::memcpy(k + p.nope_bytes, rope, p.rope_bytes);
      }
    }
  });
}

}  // namespace flashinfer::cpu
