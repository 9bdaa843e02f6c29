// Gradients of a causal depthwise convolution on the CPU. common/causal_conv1d.h has the equations. A task
// goes from its last token to the first, so that the gradients of later tokens are in the ring when dx needs
// them.
#pragma once

#include <algorithm>

#include <flashinfer/common/causal_conv1d.h>
#include <flashinfer/cpu/causal_conv1d.h>

namespace flashinfer::cpu {

// Return a value that depends on the shape only: with the number of threads, the order of sums would change.
inline int64_t causal_conv1d_part_tokens(const CausalConv1dInputs& in) {
  constexpr int64_t kMaxParts = 64;
  const int64_t tokens = (in.batch_size * in.num_tokens + kMaxParts - 1) / kMaxParts;
  return tokens < kConvTokens ? kConvTokens : tokens;
}

// Working memory of a part's block of channels.
template <typename T, int kWidth>
struct ConvGradients {
  using L = ConvLanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  const CausalConv1dBackwardParams& p;
  const CausalConv1dInputs& in = p.in;
  int64_t batch, first, count;
  ConvTaps<T, kWidth> numbers;
  ConvRows<T, kWidth> rows;
  S grads[4][kConvChannels];

  ConvGradients(const CausalConv1dBackwardParams& p_, int64_t batch_, int64_t first_, int64_t count_)
      : p(p_),
        batch(batch_),
        first(first_),
        count(count_),
        numbers(p.in.weight, p.in.bias, p.in.weight_is_float, first_, count_),
        rows(p.in, batch_, first_, count_) {}

  S* grad(int64_t t) { return grads[t & 3]; }

  // Compute g at time t. Rows must be loaded from t - (W - 1) on.
  void argument_grad(int64_t t) {
    S* to = grad(t);
    if (!p.grad_out) {
      std::fill(to, to + count, S(0));
      return;
    }
    const T* from = static_cast<const T*>(p.grad_out) + (batch * in.num_tokens + t) * in.num_channels + first;
    const S* x[kWidth];
    for (int j = 0; j < kWidth; ++j) x[j] = rows.at(t - (kWidth - 1) + j);
    for_lanes_of<L>(count, [&](int64_t c, int n) {
      V g = L::load(from + c, n);
      if (in.silu) {
        V y = L::load_wide(numbers.bias + c, n);
        for (int j = 0; j < kWidth; ++j) y += L::load_wide(numbers.taps[j] + c, n) * L::load_wide(x[j] + c, n);
        g = Silu<typename L::Math>::slope(y, g);
      }
      L::store_wide(to + c, g, n);
    });
  }

  // Compute the tokens [start, stop) of a sequence. sums: W + 1 rows of all channels.
  void run_tokens(const ConvSpan& span, int64_t start, int64_t stop, S* sums) {
    const int64_t last = std::min(stop + kWidth - 1, span.end);
    for (int64_t t = last - 1; t > last - kWidth; --t) rows.read(span, t);
    for (int64_t t = last - 1; t >= start; --t) {
      rows.read(span, t - (kWidth - 1));
      argument_grad(t);
      if (t < stop) gather(span, t, sums);
    }
  }

  void gather(const ConvSpan& span, int64_t t, S* sums) {
    const int later = static_cast<int>(std::min<int64_t>(kWidth, span.end - t));
    const int64_t at_final = t - (span.end - (kWidth - 1));
    const void* final_grad = p.grad_final && at_final >= 0 ? p.grad_final : nullptr;
    T* to = static_cast<T*>(p.grad_x) + (batch * in.num_tokens + t) * in.num_channels + first;
    const S *g[kWidth], *x[kWidth];
    for (int j = 0; j < kWidth; ++j) g[j] = grad(t + j), x[j] = rows.at(t - (kWidth - 1) + j);
    S from_final[kConvChannels];
    for (int64_t c = 0; final_grad && c < count; ++c)
      from_final[c] = L::number(final_grad, (span.sequence * in.num_channels + first + c) * (kWidth - 1) + at_final);
    for_lanes_of<L>(count, [&](int64_t c, int n) {
      V dx = final_grad ? L::load_wide(from_final + c, n) : V{};
      for (int k = 0; k < later; ++k)
        dx += L::load_wide(numbers.taps[kWidth - 1 - k] + c, n) * L::load_wide(g[k] + c, n);
      L::store(to + c, dx, n);
      const V now = L::load_wide(g[0] + c, n);
      for (int j = 0; j <= kWidth; ++j) {
        S* sum = sums + j * in.num_channels + first + c;
        const V term = j < kWidth ? now * L::load_wide(x[j < kWidth ? j : 0] + c, n) : now;
        L::store_wide(sum, L::load_wide(sum, n) + term, n);
      }
    });
  }

  // Compute the gradient of a sequence's initial state. Its first tokens read it. If the sequence is shorter
  // than the state, part of the initial state moves to the final one.
  void initial_grad(const ConvSpan& span) {
    const int64_t last = std::min(span.begin + kWidth - 1, span.end);
    for (int64_t t = span.begin - (kWidth - 1); t < span.begin; ++t) rows.read(span, t);
    for (int64_t t = span.begin; t < last; ++t) rows.read(span, t), argument_grad(t);
    const int64_t length = span.end - span.begin;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t state = (span.sequence * in.num_channels + first + c) * (kWidth - 1);
      for (int i = 0; i < kWidth - 1; ++i) {
        S sum = p.grad_final && i >= length ? L::number(p.grad_final, state + i - length) : S(0);
        for (int64_t t = 0; t <= i && t < length; ++t) sum += numbers.taps[i - t][c] * grad(span.begin + t)[c];
        L::put(p.grad_initial, state + i, sum);
      }
    }
  }
};

template <typename T, int kWidth>
void causal_conv1d_backward_of(const CausalConv1dBackwardParams& p) {
  using Gradients = ConvGradients<T, kWidth>;
  using S = typename Gradients::S;
  const CausalConv1dInputs& in = p.in;
  const int64_t channels = in.num_channels;
  S* parts = static_cast<S*>(p.parts);
  for_conv_pieces(in, p.part_tokens,
                  [&](int64_t b, int64_t start, int64_t stop, int64_t first, int64_t count, int64_t part) {
                    Gradients gradients(p, b, first, count);
                    S* sums = parts + part * (kWidth + 1) * channels;
                    for (int j = 0; j <= kWidth; ++j) std::fill_n(sums + j * channels + first, count, S(0));
                    for (int64_t t = start; t < stop;) {
                      const ConvSpan span = conv_span_at(in, b, t);
                      const int64_t end = std::min(span.end, stop);
                      gradients.run_tokens(span, t, end, sums);
                      t = end;
                    }
                  });
  if (p.grad_initial) {
    parallel_for(in.num_sequences, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t first = 0; first < channels; first += kConvChannels)
          Gradients(p, in.cu_seqlens.data ? 0 : n, first, std::min(kConvChannels, channels - first))
              .initial_grad(conv_span(in, n));
    });
  }
  parallel_for(channels, 64, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for (int j = 0; j <= kWidth; ++j) {
        double total = 0;
        for (int64_t part = 0; part < p.num_parts; ++part) total += parts[(part * (kWidth + 1) + j) * channels + c];
        void* to = j < kWidth ? p.grad_weight : p.grad_bias;
        const int64_t at = j < kWidth ? c * kWidth + j : c;
        if (!to) continue;
        if (in.weight_is_float) {
          static_cast<float*>(to)[at] = static_cast<float>(total);
        } else {
          ConvLanes<T>::put(to, at, static_cast<S>(total));
        }
      }
    }
  });
}

template <typename T>
void causal_conv1d_backward(const CausalConv1dBackwardParams& p) {
  switch (p.in.width) {
    case 2: return causal_conv1d_backward_of<T, 2>(p);
    case 3: return causal_conv1d_backward_of<T, 3>(p);
    default: return causal_conv1d_backward_of<T, 4>(p);
  }
}

}  // namespace flashinfer::cpu
