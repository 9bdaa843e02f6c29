// A causal depthwise convolution along a sequence: parameters shared by the binding and by the kernels of every
// backend.
//
// Of a channel, with taps w[0 ... W-1] and x of times before a sequence in its initial state (zeros without one):
//   y[t] = act(bias + sum_j w[j] x[t - (W - 1) + j])
// An initial or final state is [channels, W - 1], the last times before a sequence begins or when it has ended.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

constexpr int kLeastConvWidth = 2, kMostConvWidth = 4;

// Strides of states [N, channels, times] in elements.
struct ConvStateStrides {
  int64_t state, channel, time;

  FLASHINFER_HD int64_t at(int64_t n, int64_t c, int64_t i) const { return n * state + c * channel + i * time; }
};

struct CausalConv1dInputs {
  const void* x;        // [B, T, channels], channels behind each other
  const void* weight;   // [channels, W], contiguous, of x's type or float
  const void* bias;     // [channels], as weight; null: 0
  const void* initial;  // [N, channels, W - 1] of x's type; null: 0
  int64_t x_batch_stride, x_token_stride;
  ConvStateStrides initial_strides;
  int64_t batch_size, num_tokens, num_channels;
  Indices cu_seqlens;     // [num_sequences + 1], of one batch; null: each batch is a sequence
  int64_t num_sequences;  // B, or one less than cu_seqlens has
  int width;
  bool silu;             // else there is no activation
  bool weight_is_float;  // beside x of another type
  DType dtype;           // of x and of what is like it

  FLASHINFER_HD int64_t x_at(int64_t b, int64_t t) const { return b * x_batch_stride + t * x_token_stride; }
};

// Tokens [begin, end) of a batch. Values of cu_seqlens are clamped: wrong ones give wrong numbers and no wild access.
struct ConvSpan {
  int64_t sequence, begin, end;
};

FLASHINFER_HD ConvSpan conv_span(const CausalConv1dInputs& in, int64_t n) {
  if (!in.cu_seqlens.data) return {n, 0, in.num_tokens};
  const int64_t first = in.cu_seqlens[n], last = in.cu_seqlens[n + 1], most = in.num_tokens;
  const int64_t begin = first < 0 ? 0 : first > most ? most : first;
  return {n, begin, last < begin ? begin : last > most ? most : last};
}

// The sequence that token t of a batch belongs to, the last one that begins there or before: it holds t always.
FLASHINFER_HD ConvSpan conv_span_at(const CausalConv1dInputs& in, int64_t batch, int64_t t) {
  if (!in.cu_seqlens.data) return {batch, 0, in.num_tokens};
  int64_t low = 0, high = in.num_sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (in.cu_seqlens[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = in.cu_seqlens[low], last = in.cu_seqlens[low + 1];
  return {low, first < 0 ? 0 : first > t ? t : first, last <= t ? t + 1 : last > in.num_tokens ? in.num_tokens : last};
}

struct CausalConv1dParams {
  CausalConv1dInputs in;
  void* out;           // [B, T, channels], contiguous
  void* final_states;  // [N, channels, W - 1], contiguous; null: not wanted
};

// With g[t] = grad_out[t] act'(pre[t]), pre being the argument of act, which is computed again:
//   dx[t] = sum_k w[W - 1 - k] g[t + k],  dw[j] = sum_t g[t] x[t - (W - 1) + j],  dbias = sum_t g[t]
// within a sequence, and what arrives at a final state is added to the x that it is a copy of.
struct CausalConv1dBackwardParams {
  CausalConv1dInputs in;
  const void* grad_out;    // [B, T, channels], contiguous; null: 0
  const void* grad_final;  // [N, channels, W - 1], contiguous; null: 0
  void* grad_x;            // [B, T, channels], contiguous
  void* grad_weight;       // [channels, W], of weight's type
  void* grad_bias;         // [channels], of weight's type; null: not wanted
  void* grad_initial;      // [N, channels, W - 1], contiguous; null: not wanted
  // num_parts times W + 1 rows of channels: sums over the tokens of a part, for each tap and for the bias. Parts are of
  // `part_tokens` tokens of a batch, and are added in their order: the same bits in every run.
  void* parts;
  int64_t part_tokens, num_parts;
};

// One or a few tokens of each row, on states in slots that are changed in place.
struct CausalConv1dUpdateParams {
  const void* x;       // [B, channels, S] of any strides
  void* states;        // [slots, channels, length] of any strides, length >= W - 1
  const void* weight;  // [channels, W], contiguous
  const void* bias;    // [channels]; null: 0
  void* out;           // [B, channels, S], contiguous
  ConvStateStrides x_strides, state_strides;
  int64_t batch_size, num_channels, num_tokens, num_slots, state_length;
  // Where a row's times begin in a state that is a ring; null: a state's last time is its last element.
  Indices cache_seqlens;
  Indices slots;     // null: a row's own number
  int64_t pad_slot;  // of such a row, and of a slot that there is none of, out is 0 and no state is touched
  int width;
  bool silu, weight_is_float;
  DType dtype;
};

struct Launch;

// How many tokens a part of the gradient has. A sum takes at most kConvSumBytes.
int64_t causal_conv1d_part_tokens(const CausalConv1dInputs& inputs, const Launch& launch);
constexpr int64_t kConvSumBytes = 8;

void causal_conv1d(const CausalConv1dParams& params, const Launch& launch);
void causal_conv1d_update(const CausalConv1dUpdateParams& params, const Launch& launch);
void causal_conv1d_backward(const CausalConv1dBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
