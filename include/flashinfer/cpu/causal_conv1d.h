// Causal depthwise convolution on the CPU. A task is a piece of a sequence and a block of channels. It goes
// token by token, with vectors over channels. The last W rows stay in the L1 cache, converted once.
#pragma once

#include <flashinfer/common/activation.h>
#include <flashinfer/common/causal_conv1d.h>
#include <flashinfer/cpu/activation.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>

namespace flashinfer::cpu {

constexpr int64_t kConvChannels = 512, kConvTokens = 128;  // per task, at most

// float32 and half types compute in float, float64 in double.
template <typename T>
struct ConvLanes {
  using V = vfloat;
  using S = float;
  using Math = VectorMath<vfloat, float>;
  static constexpr int kCount = kLanes;

  static V load(const T* from, int count) { return cpu::load(from, count); }
  static void store(T* to, V value, int count) { cpu::store(to, value, count); }
  static V load_wide(const S* from, int count) { return cpu::load(from, count); }
  static void store_wide(S* to, V value, int count) { cpu::store(to, value, count); }
  static S number(const void* values, int64_t at) { return to_float(static_cast<const T*>(values)[at]); }
  static void put(void* values, int64_t at, S number) { static_cast<T*>(values)[at] = from_float<T>(number); }
};

template <>
struct ConvLanes<double> : Lanes<double> {
  using Math = ExactMath;
  static S number(const void* values, int64_t at) { return static_cast<const double*>(values)[at]; }
  static void put(void* values, int64_t at, S number) { static_cast<double*>(values)[at] = number; }
};

// Taps [W][channels] and bias of a block of channels, converted.
template <typename T, int kWidth>
struct ConvTaps {
  using L = ConvLanes<T>;
  using S = typename L::S;
  S taps[kWidth][kConvChannels], bias[kConvChannels];

  ConvTaps(const void* weight, const void* bias_, bool is_float, int64_t first, int64_t count) {
    const auto number = [&](const void* values, int64_t at) {
      return is_float ? static_cast<S>(static_cast<const float*>(values)[at]) : L::number(values, at);
    };
    for (int64_t c = 0; c < count; ++c) {
      for (int j = 0; j < kWidth; ++j) taps[j][c] = number(weight, (first + c) * kWidth + j);
      bias[c] = bias_ ? number(bias_, first + c) : S(0);
    }
  }
};

// Ring of rows of x around a time, for a block of channels.
template <typename T, int kWidth>
class ConvRows {
 public:
  using L = ConvLanes<T>;
  using S = typename L::S;

  ConvRows(const CausalConv1dInputs& in, int64_t batch, int64_t first, int64_t count)
      : in_(in), x_(static_cast<const T*>(in.x) + batch * in.x_batch_stride + first), first_(first), count_(count) {}

  // Read x of time t. Before span.begin it comes from the initial state.
  void read(const ConvSpan& span, int64_t t) {
    S* row = rows_[ring(t)];
    if (t >= span.begin) {
      const T* x = x_ + t * in_.x_token_stride;
      for_lanes_of<L>(count_, [&](int64_t c, int n) { L::store_wide(row + c, L::load(x + c, n), n); });
      return;
    }
    const int64_t time = t - span.begin + kWidth - 1;
    for (int64_t c = 0; c < count_; ++c)
      row[c] = in_.initial ? L::number(in_.initial, in_.initial_strides.at(span.sequence, first_ + c, time)) : S(0);
  }

  const S* at(int64_t t) const { return rows_[ring(t)]; }

 private:
  static int ring(int64_t t) { return static_cast<int>((t + kMaxConvWidth) & 3); }

  const CausalConv1dInputs& in_;
  const T* x_;
  int64_t first_, count_;
  S rows_[4][kConvChannels];
};
static_assert(kMaxConvWidth == 4, "the ring has four rows");

// Call of_x or of_initial for each time of a final state: the time lies in the sequence, or before it.
template <typename OfX, typename OfInitial>
inline void conv_final_times(const ConvSpan& span, int width, const OfX& of_x, const OfInitial& of_initial) {
  for (int i = 0; i < width - 1; ++i) {
    const int64_t t = span.end - (width - 1) + i;
    if (t >= span.begin) {
      of_x(i, t);
    } else {
      of_initial(i, t - span.begin + width - 1);
    }
  }
}

// Call body(batch, first token, last token, first channel, channels, piece) for pieces of at most `tokens`
// tokens.
template <typename Body>
void for_conv_pieces(const CausalConv1dInputs& in, int64_t tokens, const Body& body) {
  const int64_t pieces = (in.num_tokens + tokens - 1) / tokens;
  const int64_t blocks = (in.num_channels + kConvChannels - 1) / kConvChannels;
  const int64_t bytes =
      2 * (pieces > 1 ? tokens : in.num_tokens) * (blocks > 1 ? kConvChannels : in.num_channels) * size_of(in.dtype);
  parallel_rows(in.batch_size * pieces * blocks, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t piece = task / blocks, first = task % blocks * kConvChannels;
      const int64_t rest = in.num_channels - first, start = piece % pieces * tokens;
      body(piece / pieces, start, start + tokens < in.num_tokens ? start + tokens : in.num_tokens, first,
           rest < kConvChannels ? rest : kConvChannels, piece);
    }
  });
}

template <typename T, int kWidth>
void causal_conv1d_of(const CausalConv1dParams& p) {
  using L = ConvLanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  const CausalConv1dInputs& in = p.in;
  for_conv_pieces(in, kConvTokens, [&](int64_t b, int64_t start, int64_t stop, int64_t first, int64_t count, int64_t) {
    const ConvTaps<T, kWidth> numbers(in.weight, in.bias, in.weight_is_float, first, count);
    ConvRows<T, kWidth> rows(in, b, first, count);
    for (int64_t t = start; t < stop;) {
      const ConvSpan span = conv_span_at(in, b, t);
      const int64_t end = span.end < stop ? span.end : stop;
      for (int64_t before = t - (kWidth - 1); before < t; ++before) rows.read(span, before);
      for (; t < end; ++t) {
        rows.read(span, t);
        const S* x[kWidth];
        for (int j = 0; j < kWidth; ++j) x[j] = rows.at(t - (kWidth - 1) + j);
        T* out = static_cast<T*>(p.out) + (b * in.num_tokens + t) * in.num_channels + first;
        for_lanes_of<L>(count, [&](int64_t c, int n) {
          V y = L::load_wide(numbers.bias + c, n);
          for (int j = 0; j < kWidth; ++j) y += L::load_wide(numbers.taps[j] + c, n) * L::load_wide(x[j] + c, n);
          L::store(out + c, in.silu ? Silu<typename L::Math>::apply(y, V{} + S(1)) : y, n);
        });
      }
    }
  });
  if (!p.final_states) return;
  parallel_rows(in.num_sequences, 2 * in.num_channels * kWidth * size_of(in.dtype), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const ConvSpan span = conv_span(in, n);
      const T* x = static_cast<const T*>(in.x) + (in.cu_seqlens.data ? 0 : n) * in.x_batch_stride;
      T* to = static_cast<T*>(p.final_states) + n * in.num_channels * (kWidth - 1);
      const T* initial = static_cast<const T*>(in.initial);
      for (int64_t c = 0; c < in.num_channels; ++c, to += kWidth - 1) {
        conv_final_times(
            span, kWidth, [&](int i, int64_t t) { to[i] = x[t * in.x_token_stride + c]; },
            [&](int i, int64_t time) {
              if (initial) {
                to[i] = initial[in.initial_strides.at(n, c, time)];
              } else {
                L::put(to, i, S(0));
              }
            });
      }
    }
  });
}

// Return the slot of a row's state, or -1.
inline int64_t conv_slot(const CausalConv1dUpdateParams& p, int64_t row) {
  const int64_t slot = p.slots.data ? p.slots[row] : row;
  return slot == p.pad_slot || slot < 0 || slot >= p.num_slots ? -1 : slot;
}

// Goes channel by channel, because a channel's state is a few numbers with any stride.
template <typename T>
void causal_conv1d_update(const CausalConv1dUpdateParams& p) {
  using L = ConvLanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  const int64_t length = p.state_length, width = p.width;
  const auto weight = [&](const void* values, int64_t at) {
    return p.weight_is_float ? static_cast<S>(static_cast<const float*>(values)[at]) : L::number(values, at);
  };
  parallel_rows(p.batch_size * p.num_channels, (width + 2) * size_of(p.dtype), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / p.num_channels, c = item % p.num_channels, slot = conv_slot(p, row);
      T* out = static_cast<T*>(p.out) + item * p.num_tokens;
      if (slot < 0) {
        for (int64_t s = 0; s < p.num_tokens; ++s) L::put(out, s, S(0));
        continue;
      }
      const T* x = static_cast<const T*>(p.x) + p.x_strides.at(row, c, 0);
      T* state = static_cast<T*>(p.states) + p.state_strides.at(slot, c, 0);
      const int64_t step = p.state_strides.time, from = p.cache_seqlens.data ? p.cache_seqlens[row] : 0;
      const auto in_ring = [&](int64_t i) { return ((from + i) % length + length) % length; };
      S taps[kMaxConvWidth], times[kMaxConvWidth];
      for (int j = 0; j < width; ++j) taps[j] = weight(p.weight, c * width + j);
      for (int j = 0; j + 1 < width; ++j)
        times[j + 1] =
            L::number(state, (p.cache_seqlens.data ? in_ring(j - (width - 1)) : length - (width - 1) + j) * step);
      for (int64_t s = 0; s < p.num_tokens; ++s) {
        for (int j = 0; j + 1 < width; ++j) times[j] = times[j + 1];
        times[width - 1] = L::number(x, s * p.x_strides.time);
        S y = p.bias ? weight(p.bias, c) : S(0);
        for (int j = 0; j < width; ++j) y += taps[j] * times[j];
        L::put(out, s, p.silu ? Silu<typename L::Math>::apply(V{} + y, V{} + S(1))[0] : y);
      }
      if (p.cache_seqlens.data) {
        for (int64_t s = 0; s < p.num_tokens; ++s) state[in_ring(s) * step] = x[s * p.x_strides.time];
      } else {
        for (int64_t i = 0; i < length; ++i) {
          const int64_t next = i + p.num_tokens;
          state[i * step] = next < length ? state[next * step] : x[(next - length) * p.x_strides.time];
        }
      }
    }
  });
}

template <typename T>
void causal_conv1d(const CausalConv1dParams& p) {
  switch (p.in.width) {
    case 2: return causal_conv1d_of<T, 2>(p);
    case 3: return causal_conv1d_of<T, 3>(p);
    default: return causal_conv1d_of<T, 4>(p);
  }
}

}  // namespace flashinfer::cpu
