// Rotary embeddings with 8-bit results: parameters of the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/page.h>
#include <flashinfer/common/quant_scale.h>

namespace flashinfer {

// One tensor of heads. The elements of each become 8-bit numbers: rotated if `rotates`, rounded to the
// input's type, multiplied by `scale` in float, rounded and clamped to the finite range. Strides count
// elements.
struct QuantHeads {
  const void* input;
  uint8_t* output;
  int64_t heads, dim;
  int64_t input_token_stride, input_head_stride;
  int64_t output_token_stride, output_head_stride;  // in a cache the first is the stride of a slot
  int64_t page_stride;
  QuantScale scale;
  bool rotates, paged;
};

constexpr int kMaxQuantHeads = 5;  // q and k in two parts each, and v

// Equations of the rotation: common/rope.h. The angles of position p are row p of a cache of cosines, then
// sines: [cache_size, rotary_dim]. On CUDA a position outside the cache means no rotation.
struct RopeQuantParams {
  QuantHeads parts[kMaxQuantHeads];
  int count;  // parts in use
  int64_t num_tokens, rotary_dim;
  bool interleave;
  Indices pos_ids;
  const float* cos_sin_cache;
  int64_t cache_size, cache_stride;
  PageTable pages;  // of the parts in a cache. Tokens without a slot write none of them.
  DType dtype, output_dtype;
  const char* op;  // operator name, for messages
};

struct Launch;
void rope_quant(const RopeQuantParams& params, const Launch& launch);

}  // namespace flashinfer
