// What the rope family computes: parameters shared by the binding and by the kernels of every backend.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

// A vector of int32 or int64.
struct Indices {
  const void* data;
  bool is_int64;

  FLASHINFER_HD int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The heads of every token before and after; strides in elements.
struct RopeHeads {
  const void* input;
  void* output;
  int64_t heads;
  int64_t input_token_stride, input_head_stride;
  int64_t output_token_stride, output_head_stride;
};

constexpr int kMaxRotaryPairs = 256;

// Rotates pair i of every head of a token by the token's angle of frequency i:
//   (a, b) -> (a cos - b sin, b cos + a sin), the pair being elements (i, i + rotary_dim / 2), or (2 i, 2 i + 1) where
// interleaved. Elements from rotary_dim on are copied.
struct RopeParams {
  RopeHeads q, k;
  int64_t num_tokens, head_dim, rotary_dim;
  bool interleave;
  bool in_place;
  bool inverse;  // rotates back, as gradients are
  DType dtype;

  // The position of a token: pos_ids[token]; or with requests, offsets[r] + token - indptr[r] in the request r with
  // indptr[r] <= token < indptr[r + 1]. Tokens after the last request have position 0.
  bool with_requests;
  Indices pos_ids, indptr, offsets;
  int64_t num_requests;

  // The angle: from a cache of the cosines, then the sines, of every position, [cache_size, rotary_dim]; or without it,
  // position times quarters[i] in quarter turns. Quarters, because an angle is reduced by whole ones exactly. Kernels
  // of a graph whose numbers vary have a tensor of frequencies in radians instead.
  bool with_cache;
  const float* cos_sin_cache;
  int64_t cache_size, cache_stride;
  const double* frequencies;
  double quarters[kMaxRotaryPairs];  // zeros after the last

  FLASHINFER_HD int64_t position(int64_t token) const {
    if (!with_requests) return pos_ids[token];
    int64_t low = 0, high = num_requests;  // the first request that ends after the token
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (indptr[middle + 1] <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < num_requests ? offsets[low] + token - indptr[low] : 0;
  }
};

struct Launch;
void rope(const RopeParams& params, const Launch& launch);

}  // namespace flashinfer
