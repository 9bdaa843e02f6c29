// Concatenation of the two parts of MLA's keys: parameters of the kernels.
#pragma once

#include <cstdint>

namespace flashinfer {

// k[t, h] = nope[t, h] followed by rope[t], which all heads share. Bytes move, so one kernel serves every
// dtype.
struct ConcatMlaParams {
  char* k;
  const char *nope, *rope;
  int64_t k_token_stride, k_head_stride;  // strides in bytes
  int64_t nope_token_stride, nope_head_stride;
  int64_t rope_token_stride;
  int64_t nope_bytes, rope_bytes;  // bytes of a row, multiples of 16
  int64_t tokens, heads;
};

struct Launch;
void concat_mla_k(const ConcatMlaParams& params, const Launch& launch);

}  // namespace flashinfer
