// Causal depthwise convolution along a sequence: parameters that the binding and the kernels of every backend
// share.
//
// For each channel, with taps w[0 ... W-1]:
//   y[t] = act(bias + sum_j w[j] x[t - (W - 1) + j])
// The initial state has x before the sequence, or zeros if it is null. States are [channels, W - 1]: the last
// times before a sequence begins, or after it has ended.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/search.h>

namespace flashinfer {

constexpr int kMinConvWidth = 2, kMaxConvWidth = 4;

// Strides of states [N, channels, times] in elements.
struct ConvStateStrides {
  int64_t state, channel, time;

  FLASHINFER_HD int64_t at(int64_t n, int64_t c, int64_t i) const { return n * state + c * channel + i * time; }
};

struct CausalConv1dInputs {
  const void* x;        // [B, T, channels], channels contiguous
  const void* weight;   // [channels, W], contiguous, of x's type or float
  const void* bias;     // [channels], as weight; null: 0
  const void* initial;  // [N, channels, W - 1] of x's type; null: 0
  int64_t x_batch_stride, x_token_stride;
  ConvStateStrides initial_strides;
  int64_t batch_size, num_tokens, num_channels;
  Indices cu_seqlens;     // [num_sequences + 1], batch 1; null: each batch is a sequence
  int64_t num_sequences;  // B, or the length of cu_seqlens minus 1
  int width;
  bool silu;             // else no activation
  bool weight_is_float;  // with x of another type
  DType dtype;           // of x, out and states

  FLASHINFER_HD int64_t x_at(int64_t b, int64_t t) const { return b * x_batch_stride + t * x_token_stride; }
};

// Tokens [begin, end) of a batch. Values of cu_seqlens are clamped: invalid ones give wrong numbers, but no
// access out of bounds.
struct ConvSpan {
  int64_t sequence, begin, end;
};

FLASHINFER_HD ConvSpan conv_span(const CausalConv1dInputs& in, int64_t n) {
  if (!in.cu_seqlens.data) return {n, 0, in.num_tokens};
  const int64_t first = in.cu_seqlens[n], last = in.cu_seqlens[n + 1], most = in.num_tokens;
  const int64_t begin = first < 0 ? 0 : first > most ? most : first;
  return {n, begin, last < begin ? begin : last > most ? most : last};
}

// Return the sequence of token t of a batch: the last one that begins at t or before. The result always
// contains t.
FLASHINFER_HD ConvSpan conv_span_at(const CausalConv1dInputs& in, int64_t batch, int64_t t) {
  if (!in.cu_seqlens.data) return {batch, 0, in.num_tokens};
  const int64_t low = last_at_or_before(int64_t{0}, in.num_sequences, t, [&](int64_t s) { return in.cu_seqlens[s]; });
  const int64_t first = in.cu_seqlens[low], last = in.cu_seqlens[low + 1];
  return {low, first < 0 ? 0 : first > t ? t : first, last <= t ? t + 1 : last > in.num_tokens ? in.num_tokens : last};
}

struct CausalConv1dParams {
  CausalConv1dInputs in;
  void* out;           // [B, T, channels], contiguous
  void* final_states;  // [N, channels, W - 1], contiguous; null: not computed
};

// With g[t] = grad_out[t] act'(pre[t]), where pre, the argument of act, is recomputed, within a sequence:
//   dx[t] = sum_k w[W - 1 - k] g[t + k],  dw[j] = sum_t g[t] x[t - (W - 1) + j],  dbias = sum_t g[t]
// The gradient of a final state is added to that of the x which it copies.
struct CausalConv1dBackwardParams {
  CausalConv1dInputs in;
  const void* grad_out;    // [B, T, channels], contiguous; null: 0
  const void* grad_final;  // [N, channels, W - 1], contiguous; null: 0
  void* grad_x;            // [B, T, channels], contiguous
  void* grad_weight;       // [channels, W], of weight's type
  void* grad_bias;         // [channels], of weight's type; null: not computed
  void* grad_initial;      // [N, channels, W - 1], contiguous; null: not computed
  // num_parts * (W + 1) rows of channels: sums over the tokens of a part, per tap and for the bias. A part
  // has `part_tokens` tokens of a batch. Parts are added in order, so that every run gives the same bits.
  void* parts;
  int64_t part_tokens, num_parts;
};

// Update of each row by a few tokens, on states in slots that are updated in place.
struct CausalConv1dUpdateParams {
  const void* x;       // [B, channels, S] of any strides
  void* states;        // [slots, channels, length] of any strides, length >= W - 1
  const void* weight;  // [channels, W], contiguous
  const void* bias;    // [channels]; null: 0
  void* out;           // [B, channels, S], contiguous
  ConvStateStrides x_strides, state_strides;
  int64_t batch_size, num_channels, num_tokens, num_slots, state_length;
  // Start of a row's times in a state that is a ring. Null: the last time is the last element.
  Indices cache_seqlens;
  Indices slots;     // null: the row's number
  int64_t pad_slot;  // out is 0 and no state is touched; the same for slots outside the pool
  int width;
  bool silu, weight_is_float;
  DType dtype;
};

struct Launch;

// Return the tokens in a part of the gradient. A sum takes at most kConvSumBytes.
int64_t causal_conv1d_part_tokens(const CausalConv1dInputs& inputs, const Launch& launch);
constexpr int64_t kConvSumBytes = 8;

void causal_conv1d(const CausalConv1dParams& params, const Launch& launch);
void causal_conv1d_update(const CausalConv1dUpdateParams& params, const Launch& launch);
void causal_conv1d_backward(const CausalConv1dBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
