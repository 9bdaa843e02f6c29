// RMSNorm over all heads of queries and keys, then rotary embeddings of three axes: parameters of the
// kernels.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

constexpr int kMaxAxisPairs = 128;  // of a head

// A row of the input has the heads of q, k and v. For q and k:
//   y = x / sqrt(mean(x^2) + eps) * weight  over all heads, in float32 (y = x without the norm)
//   pair i of a head: (a, b) -> (a cos - b sin, b cos + a sin),  angle = position[axis of i] * frequencies[i]
// A pair is elements (2 i, 2 i + 1) if `interleave`, otherwise (i, i + head_dim / 2). v is copied.
struct QkNormRopeParams {
  const void* input;
  const void* weights[2];
  void* outputs[3];           // [num_tokens, heads, head_dim], dense within a token
  int64_t output_strides[3];  // of tokens
  int64_t heads[3];
  int64_t input_stride, num_tokens, head_dim;
  int64_t frames, height, width;    // token t is at (t / (height * width) % frames, t / width % height, t % width)
  int32_t height_pair, width_pair;  // first pairs of the axes height and width
  float frequencies[kMaxAxisPairs];
  float eps;
  float scales[3];  // factors of 8-bit outputs
  bool interleave, normalises, eight_bits;

  FLASHINFER_HD float angle(int64_t token, int pair) const {
    const int64_t position = pair >= width_pair    ? token % width
                             : pair >= height_pair ? token / width % height
                                                   : token / (height * width) % frames;
    return static_cast<float>(position) * frequencies[pair];
  }
  FLASHINFER_HD int64_t first_column(int part) const {
    return (part > 0 ? heads[0] : 0) * head_dim + (part > 1 ? heads[1] : 0) * head_dim;
  }
};

struct Launch;
void qk_norm_rope(const QkNormRopeParams& params, const Launch& launch);

}  // namespace flashinfer
