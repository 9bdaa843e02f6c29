// Rotary embeddings: parameters of the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/search.h>

namespace flashinfer {

// Input and output heads of every token. Strides count elements.
struct RopeHeads {
  const void* input;
  void* output;
  int64_t heads;
  int64_t input_token_stride, input_head_stride;
  int64_t output_token_stride, output_head_stride;
};

constexpr int kMaxRotaryPairs = 256;

// Rotate pair i of every head of a token by the token's angle of frequency i:
//   (a, b) -> (a cos - b sin, b cos + a sin)
// A pair is elements (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if `interleave`. Elements from rotary_dim on
// are copied.
struct RopeParams {
  RopeHeads q, k;
  int64_t num_tokens, head_dim, rotary_dim;
  bool interleave;
  bool in_place;
  bool inverse;  // rotates back, for gradients
  DType dtype;

  // The position of a token is pos_ids[token]. With requests it is offsets[r] + token - indptr[r] for the
  // request r with indptr[r] <= token < indptr[r + 1]. Tokens after the last request have position 0.
  bool with_requests;
  Indices pos_ids, indptr, offsets;
  int64_t num_requests;

  // Source of the angles, one of three:
  //   a cache of the cosines, then the sines, of every position: [cache_size, rotary_dim]
  //   position * quarters[i] in quarter turns, because an angle is reduced by whole quarter turns exactly
  //   a tensor of frequencies in radians, for graphs whose numbers vary
  bool with_cache;
  const float* cos_sin_cache;
  int64_t cache_size, cache_stride;
  const double* frequencies;
  double quarters[kMaxRotaryPairs];  // zeros after the last frequency

  FLASHINFER_HD int64_t position(int64_t token) const {
    if (!with_requests) return pos_ids[token];
    const int64_t request =
        last_at_or_before(int64_t{0}, num_requests + 1, token, [&](int64_t r) { return indptr[r]; });
    return request < num_requests ? offsets[request] + token - indptr[request] : 0;
  }
};

struct Launch;
void rope(const RopeParams& params, const Launch& launch);

}  // namespace flashinfer
