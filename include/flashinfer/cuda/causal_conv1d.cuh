// Causal depthwise convolution on CUDA, bound by memory. common/causal_conv1d.h has the equations. A thread
// has some adjacent channels of a piece of a sequence. It goes along the tokens and has the last W - 1 of
// them in registers. x is read once, with the widest loads.
#pragma once

#include <type_traits>

#include <flashinfer/common/activation.h>
#include <flashinfer/common/causal_conv1d.h>
#include <flashinfer/cuda/activation.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kConvThreads = 128;
constexpr int kConvTokens = 64;   // per piece
constexpr int kConvChannels = 4;  // per thread, if aligned: more would take registers from the loads of other threads

// Tokens with loads in flight. A multiple of the width, so that ring indices are constants.
template <int kWidth>
constexpr int kConvStep = kWidth == 3 ? 6 : 8;

template <typename T>
using ConvSilu = Silu<std::conditional_t<std::is_same_v<T, float>, DoubleMath, FloatMath>>;

template <typename T>
__device__ __forceinline__ float conv_number(const void* values, bool is_float, int64_t at) {
  return is_float ? static_cast<const float*>(values)[at] : to_float(static_cast<const T*>(values)[at]);
}

// Taps and bias of a thread's channels.
template <typename T, int kWidth, int kN>
struct ConvTaps {
  float taps[kWidth][kN], bias[kN];

  __device__ __forceinline__ ConvTaps(const CausalConv1dInputs& in, int64_t channel) {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        taps[j][c] = conv_number<T>(in.weight, in.weight_is_float, (channel + c) * kWidth + j);
      bias[c] = in.bias ? conv_number<T>(in.bias, in.weight_is_float, channel + c) : 0.0f;
    }
  }
};

// Load x of a time in some channels. Before the sequence it comes from the initial state.
template <typename T, int kWidth, int kN>
__device__ __forceinline__ void conv_time(const CausalConv1dInputs& in, const ConvSpan& span, int64_t batch, int64_t t,
                                          int64_t channel, float (&x)[kN]) {
  if (t >= span.begin) {
    load_vec<T, kN>(static_cast<const T*>(in.x) + in.x_at(batch, t) + channel).to_floats(x);
    return;
  }
  const int64_t time = t - span.begin + kWidth - 1;
  const T* initial = static_cast<const T*>(in.initial);
#pragma unroll
  for (int c = 0; c < kN; ++c)
    x[c] = initial ? to_float(initial[in.initial_strides.at(span.sequence, channel + c, time)]) : 0.0f;
}

template <typename T, int kWidth, int kN>
__device__ __forceinline__ void conv_final_states(const CausalConv1dParams& p, int64_t n, int64_t channel) {
  const ConvSpan span = conv_span(p.in, n);
  T* to = static_cast<T*>(p.final_states) + (n * p.in.num_channels + channel) * (kWidth - 1);
  for (int i = 0; i < kWidth - 1; ++i) {
    float x[kN];
    conv_time<T, kWidth>(p.in, span, p.in.cu_seqlens.data ? 0 : n, span.end - (kWidth - 1) + i, channel, x);
#pragma unroll
    for (int c = 0; c < kN; ++c) to[c * (kWidth - 1) + i] = from_float<T>(x[c]);
  }
}

// blockIdx.x: pieces of each batch, then sequences with final states. blockIdx.y: channels.
template <typename T, int kWidth, int kN>
__global__ void __launch_bounds__(kConvThreads) causal_conv1d_kernel(const CausalConv1dParams p, int64_t num_pieces) {
  constexpr int kStep = kConvStep<kWidth>;
  const CausalConv1dInputs& in = p.in;
  const int64_t channel = (int64_t{blockIdx.y} * kConvThreads + threadIdx.x) * kN;
  wait_for_inputs();
  launch_dependents();
  if (channel >= in.num_channels) return;
  if (blockIdx.x >= num_pieces) return conv_final_states<T, kWidth, kN>(p, blockIdx.x - num_pieces, channel);

  const int64_t per_batch = (in.num_tokens + kConvTokens - 1) / kConvTokens;
  const int64_t b = blockIdx.x / per_batch, start = blockIdx.x % per_batch * kConvTokens;
  const int64_t stop = start + kConvTokens < in.num_tokens ? start + kConvTokens : in.num_tokens;
  const ConvTaps<T, kWidth, kN> numbers(in, channel);
  const T* rows = static_cast<const T*>(in.x) + in.x_at(b, 0) + channel;
  T* out = static_cast<T*>(p.out) + b * in.num_tokens * in.num_channels + channel;
  float x[kWidth][kN];  // ring: for the u-th token of a step, time t - (W - 1) + j is at (u + 1 + j) % W
  for (int64_t t = start; t < stop;) {
    const ConvSpan span = conv_span_at(in, b, t);
    const int64_t end = span.end < stop ? span.end : stop;
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) conv_time<T, kWidth>(in, span, b, t - (kWidth - 1) + j, channel, x[1 + j]);
    for (; t < end; t += kStep) {
      Vec<T, kN> loaded[kStep];
#pragma unroll
      for (int u = 0; u < kStep; ++u)
        if (t + u < end) loaded[u] = load_vec<T, kN>(rows + (t + u) * in.x_token_stride);
#pragma unroll
      for (int u = 0; u < kStep; ++u) {
        if (t + u >= end) break;
        loaded[u].to_floats(x[u % kWidth]);
        float y[kN];
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          y[c] = numbers.bias[c];
#pragma unroll
          for (int j = 0; j < kWidth; ++j) y[c] += numbers.taps[j][c] * x[(u + 1 + j) % kWidth][c];
          if (in.silu) y[c] = ConvSilu<T>::apply(y[c], 1.0f);
        }
        store_vec(out + (t + u) * in.num_channels, Vec<T, kN>::from_floats(y));
      }
    }
    t = end;
  }
}

// Return true if a thread can take kN channels: rows of x and of new tensors are aligned to kN elements.
template <typename T, int kN>
inline bool conv_fits(const CausalConv1dInputs& in, const void* grad = nullptr) {
  const auto whole = [](int64_t elements) { return elements % kN == 0; };
  const auto at = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % (kN * sizeof(T)) == 0; };
  return at(in.x) && at(grad) && whole(in.num_channels) && whole(in.x_batch_stride) && whole(in.x_token_stride);
}

inline unsigned conv_blocks(int64_t channels, int per_thread) {
  const int64_t block = int64_t{kConvThreads} * per_thread;
  return static_cast<unsigned>((channels + block - 1) / block);
}

template <typename T, int kWidth>
void causal_conv1d_of(const CausalConv1dParams& p, const Launch& where) {
  constexpr int kN = kConvChannels;
  const int64_t pieces = p.in.batch_size * ((p.in.num_tokens + kConvTokens - 1) / kConvTokens);
  const int64_t blocks = pieces + (p.final_states ? p.in.num_sequences : 0);
  const bool fits = conv_fits<T, kN>(p.in);
  launch(fits ? causal_conv1d_kernel<T, kWidth, kN> : causal_conv1d_kernel<T, kWidth, 1>,
         dim3(static_cast<unsigned>(blocks), conv_blocks(p.in.num_channels, fits ? kN : 1)), dim3(kConvThreads), where,
         p, pieces);
}

// A thread has a channel of a row. Adjacent threads access adjacent states, in either layout.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvThreads) causal_conv1d_update_kernel(const CausalConv1dUpdateParams p) {
  const int64_t c = int64_t{blockIdx.y} * kConvThreads + threadIdx.x, row = blockIdx.x;
  wait_for_inputs();
  launch_dependents();
  if (c >= p.num_channels) return;
  T* out = static_cast<T*>(p.out) + (row * p.num_channels + c) * p.num_tokens;
  const int64_t slot = p.slots.data ? p.slots[row] : row;
  if (slot == p.pad_slot || slot < 0 || slot >= p.num_slots) {
    for (int64_t s = 0; s < p.num_tokens; ++s) out[s] = from_float<T>(0.0f);
    return;
  }
  const T* x = static_cast<const T*>(p.x) + p.x_strides.at(row, c, 0);
  T* state = static_cast<T*>(p.states) + p.state_strides.at(slot, c, 0);
  const int64_t length = p.state_length, step = p.state_strides.time;
  const bool ring = p.cache_seqlens.data;
  int64_t from = ring ? p.cache_seqlens[row] % length : 0;
  if (from < 0) from += length;
  float taps[kWidth], times[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) taps[j] = conv_number<T>(p.weight, p.weight_is_float, c * kWidth + j);
#pragma unroll
  for (int j = 0; j + 1 < kWidth; ++j) {
    const int64_t at = ring ? from + j - (kWidth - 1) : length + j - (kWidth - 1);
    times[j + 1] = to_float(state[(at < 0 ? at + length : at) * step]);
  }
  const float bias = p.bias ? conv_number<T>(p.bias, p.weight_is_float, c) : 0.0f;
  for (int64_t s = 0; s < p.num_tokens; ++s) {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) times[j] = times[j + 1];
    times[kWidth - 1] = to_float(x[s * p.x_strides.time]);
    float y = bias;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) y += taps[j] * times[j];
    if (p.silu) y = ConvSilu<T>::apply(y, 1.0f);
    out[s] = from_float<T>(y);
  }
  if (ring) {
    for (int64_t s = 0; s < p.num_tokens; ++s) {
      const int64_t at = from + s;  // a state has at least as many times
      state[(at >= length ? at - length : at) * step] = x[s * p.x_strides.time];
    }
    return;
  }
  if (p.num_tokens == 1 && length == kWidth - 1) {  // all times are in registers
#pragma unroll
    for (int j = 1; j < kWidth; ++j) state[(j - 1) * step] = from_float<T>(times[j]);
    return;
  }
  for (int64_t i = 0; i < length; ++i) {
    const int64_t next = i + p.num_tokens;
    state[i * step] = next < length ? state[next * step] : x[(next - length) * p.x_strides.time];
  }
}

// Call body(std::integral_constant<int, width>).
template <typename Body>
void with_conv_width(int width, const Body& body) {
  switch (width) {
    case 2: return body(std::integral_constant<int, 2>{});
    case 3: return body(std::integral_constant<int, 3>{});
    default: return body(std::integral_constant<int, 4>{});
  }
}

template <typename T>
void causal_conv1d(const CausalConv1dParams& p, const Launch& where) {
  with_conv_width(p.in.width, [&](auto width) { causal_conv1d_of<T, width>(p, where); });
}

template <typename T>
void causal_conv1d_update(const CausalConv1dUpdateParams& p, const Launch& where) {
  if (p.num_tokens == 0) return;
  with_conv_width(p.width, [&](auto width) {
    launch(causal_conv1d_update_kernel<T, width>,
           dim3(static_cast<unsigned>(p.batch_size), conv_blocks(p.num_channels, 1)), dim3(kConvThreads), where, p);
  });
}

}  // namespace flashinfer::cuda
