// Gradients of a causal depthwise convolution on CUDA. common/causal_conv1d.h has the equations. A thread has
// some adjacent channels of a part of a batch. It goes from the last token to the first, so that the
// gradients of later tokens are in registers when dx needs them. Sums of the weight are in registers too. A
// second kernel adds the parts in order.
#pragma once

#include <flashinfer/common/causal_conv1d.h>
#include <flashinfer/cuda/causal_conv1d.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kConvGradStep = 4;      // tokens with loads in flight
constexpr int kMaxConvTokens = 1024;  // per part: longer float sums lose digits

// Channels per thread, if aligned. More would spill.
template <typename T>
constexpr int kConvGradChannels = 8 / sizeof(T);

// Return the tokens per part. Parts grow while there are eight CTAs per SM, so that the sums of parts stay a
// small share of the traffic.
inline int64_t causal_conv1d_part_tokens(const CausalConv1dInputs& in, const Launch& where) {
  const int64_t columns = conv_blocks(in.num_channels, kConvChannels);
  int64_t tokens = kConvTokens;
  while (tokens < kMaxConvTokens &&
         in.batch_size * (in.num_tokens / (2 * tokens)) * columns >= 8 * int64_t{device_info(where.device).num_sms})
    tokens *= 2;
  return tokens;
}

template <typename T, int kWidth, int kN>
struct ConvGradients {
  const CausalConv1dBackwardParams& p;
  const CausalConv1dInputs& in;
  int64_t batch, channel;
  ConvTaps<T, kWidth, kN> numbers;
  float x[kWidth][kN];  // at times t - (W - 1) to t
  float g[kWidth][kN];  // g at times t to t + W - 1

  __device__ __forceinline__ ConvGradients(const CausalConv1dBackwardParams& p_, int64_t batch_, int64_t channel_)
      : p(p_), in(p_.in), batch(batch_), channel(channel_), numbers(p_.in, channel_) {}

  // Moves from time t + 1 to t. `oldest` is x of t - (W - 1), `grad` the gradient of out.
  __device__ __forceinline__ void step_back(const float (&oldest)[kN], const float (&grad)[kN]) {
#pragma unroll
    for (int j = kWidth - 1; j > 0; --j) {
#pragma unroll
      for (int c = 0; c < kN; ++c) x[j][c] = x[j - 1][c], g[j][c] = g[j - 1][c];
    }
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      x[0][c] = oldest[c];
      g[0][c] = grad[c];
      if (!in.silu) continue;
      float y = numbers.bias[c];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) y += numbers.taps[j][c] * x[j][c];
      g[0][c] = ConvSilu<T>::slope(y, grad[c]);
    }
  }

  __device__ __forceinline__ void grad_out(int64_t t, float (&grad)[kN]) const {
    if (p.grad_out) {
      load_vec<T, kN>(static_cast<const T*>(p.grad_out) + (batch * in.num_tokens + t) * in.num_channels + channel)
          .to_floats(grad);
    } else {
#pragma unroll
      for (int c = 0; c < kN; ++c) grad[c] = 0.0f;
    }
  }

  // Prepares for tokens [.., last), which are taken from last - 1 down: x of the W - 1 times before, and no
  // later gradients.
  __device__ __forceinline__ void start(const ConvSpan& span, int64_t last) {
#pragma unroll
    for (int j = 0; j < kWidth - 1; ++j) conv_time<T, kWidth>(in, span, batch, last - (kWidth - 1) + j, channel, x[j]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int c = 0; c < kN; ++c) g[j][c] = 0.0f;
    }
  }

  // Return the gradient of element i of a sequence's final state.
  __device__ __forceinline__ float final_grad(int64_t sequence, int c, int64_t i) const {
    const T* from = static_cast<const T*>(p.grad_final);
    return to_float(from[(sequence * in.num_channels + channel + c) * (kWidth - 1) + i]);
  }
};

// Compute the gradient of a sequence's initial state. Its first tokens read it. If the sequence is shorter
// than the state, part of the initial state moves to the final one.
template <typename T, int kWidth, int kN>
__device__ __forceinline__ void conv_grad_initial(const CausalConv1dBackwardParams& p, int64_t n, int64_t channel) {
  const ConvSpan span = conv_span(p.in, n);
  ConvGradients<T, kWidth, kN> grads(p, p.in.cu_seqlens.data ? 0 : n, channel);
  const int64_t length = span.end - span.begin, few = length < kWidth - 1 ? length : kWidth - 1;
  grads.start(span, span.begin + few);
  for (int64_t t = span.begin + few - 1; t >= span.begin; --t) {
    float oldest[kN], grad[kN];
    conv_time<T, kWidth>(p.in, span, grads.batch, t - (kWidth - 1), channel, oldest);
    grads.grad_out(t, grad);
    grads.step_back(oldest, grad);
  }
  // g[0 ...] now has the first tokens, and 0 after the end of the sequence.
  T* to = static_cast<T*>(p.grad_initial) + (n * p.in.num_channels + channel) * (kWidth - 1);
#pragma unroll
  for (int c = 0; c < kN; ++c) {
#pragma unroll
    for (int i = 0; i < kWidth - 1; ++i) {
      float sum = p.grad_final && i >= length ? grads.final_grad(n, c, i - length) : 0.0f;
#pragma unroll
      for (int t = 0; t <= i; ++t) sum += grads.numbers.taps[i - t][c] * grads.g[t][c];
      to[c * (kWidth - 1) + i] = from_float<T>(sum);
    }
  }
}

// blockIdx.x: parts, then sequences with gradients of initial states. blockIdx.y: channels.
template <typename T, int kWidth, int kN>
__global__ void __launch_bounds__(kConvThreads, 3) causal_conv1d_backward_kernel(const CausalConv1dBackwardParams p) {
  const CausalConv1dInputs& in = p.in;
  const int64_t channel = (int64_t{blockIdx.y} * kConvThreads + threadIdx.x) * kN;
  wait_for_inputs();
  if (channel >= in.num_channels) return;
  if (blockIdx.x >= p.num_parts) return conv_grad_initial<T, kWidth, kN>(p, blockIdx.x - p.num_parts, channel);

  const int64_t per_batch = (in.num_tokens + p.part_tokens - 1) / p.part_tokens;
  const int64_t b = blockIdx.x / per_batch, start = blockIdx.x % per_batch * p.part_tokens;
  const int64_t stop = start + p.part_tokens < in.num_tokens ? start + p.part_tokens : in.num_tokens;
  ConvGradients<T, kWidth, kN> grads(p, b, channel);
  float sums[kWidth + 1][kN] = {};
  T* out = static_cast<T*>(p.grad_x) + b * in.num_tokens * in.num_channels + channel;
  for (int64_t next = stop; next > start;) {  // the last sequence first
    const ConvSpan span = conv_span_at(in, b, next - 1);
    const int64_t first = span.begin > start ? span.begin : start;
    const int64_t last = next + kWidth - 1 < span.end ? next + kWidth - 1 : span.end;
    grads.start(span, last);
    for (int64_t t = last - 1; t >= first;) {
      float oldest[kConvGradStep][kN], grad[kConvGradStep][kN];
#pragma unroll
      for (int u = 0; u < kConvGradStep; ++u) {
        if (t - u < first) continue;
        conv_time<T, kWidth>(in, span, b, t - u - (kWidth - 1), channel, oldest[u]);
        grads.grad_out(t - u, grad[u]);
      }
#pragma unroll
      for (int u = 0; u < kConvGradStep; ++u, --t) {
        if (t < first) continue;
        grads.step_back(oldest[u], grad[u]);
        if (t >= next) continue;  // in the next part
        float dx[kN];
        const int64_t at_final = t - (span.end - (kWidth - 1));
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          dx[c] = p.grad_final && at_final >= 0 ? grads.final_grad(span.sequence, c, at_final) : 0.0f;
#pragma unroll
          for (int k = 0; k < kWidth; ++k) {
            dx[c] += grads.numbers.taps[kWidth - 1 - k][c] * grads.g[k][c];
            sums[k][c] += grads.g[0][c] * grads.x[k][c];
          }
          sums[kWidth][c] += grads.g[0][c];
        }
        store_vec(out + t * in.num_channels, Vec<T, kN>::from_floats(dx));
      }
    }
    next = first;
  }
  float* part = static_cast<float*>(p.parts) + blockIdx.x * (kWidth + 1) * in.num_channels + channel;
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) store_vec(part + j * in.num_channels, Vec<float, kN>::from_floats(sums[j]));
  launch_dependents();
}

// threadIdx.x: channels, threadIdx.y: parts. blockIdx.y: taps, then the bias.
template <typename T>
__global__ void __launch_bounds__(kConvThreads) causal_conv1d_sums_kernel(const CausalConv1dBackwardParams p) {
  __shared__ float partial[kConvThreads];
  const int64_t channels = p.in.num_channels, c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  const int width = p.in.width, j = blockIdx.y;
  const float* parts = static_cast<const float*>(p.parts) + j * channels + c;
  wait_for_inputs();
  float total = 0;
  for (int64_t part = threadIdx.y; c < channels && part < p.num_parts; part += blockDim.y)
    total += parts[part * (width + 1) * channels];
  partial[threadIdx.y * 32 + threadIdx.x] = total;
  __syncthreads();
  void* to = j < width ? p.grad_weight : p.grad_bias;
  if (threadIdx.y == 0 && c < channels && to) {
    for (int y = 1; y < blockDim.y; ++y) total += partial[y * 32 + threadIdx.x];
    const int64_t at = j < width ? c * width + j : c;
    if (p.in.weight_is_float) {
      static_cast<float*>(to)[at] = total;
    } else {
      static_cast<T*>(to)[at] = from_float<T>(total);
    }
  }
  launch_dependents();
}

template <typename T>
void causal_conv1d_backward(const CausalConv1dBackwardParams& p, const Launch& where) {
  constexpr int kN = kConvGradChannels<T>;
  const CausalConv1dInputs& in = p.in;
  const bool fits = conv_fits<T, kN>(in, p.grad_out);
  const int64_t blocks = p.num_parts + (p.grad_initial ? in.num_sequences : 0);
  const dim3 grid(static_cast<unsigned>(blocks), conv_blocks(in.num_channels, fits ? kN : 1));
  with_conv_width(in.width, [&](auto width) {
    launch(fits ? causal_conv1d_backward_kernel<T, width, kN> : causal_conv1d_backward_kernel<T, width, 1>, grid,
           dim3(kConvThreads), where, p);
  });
  launch(causal_conv1d_sums_kernel<T>, dim3(static_cast<unsigned>((in.num_channels + 31) / 32), in.width + 1),
         dim3(32, kConvThreads / 32), where, p);
}

}  // namespace flashinfer::cuda
