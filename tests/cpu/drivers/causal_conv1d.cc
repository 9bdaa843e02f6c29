// The causal convolution over sequences, its gradients, and its step with states in slots.
#include <flashinfer/cpu/causal_conv1d.h>
#include <flashinfer/cpu/causal_conv1d_backward.h>

#include "harness.h"

using namespace driver;

struct Shape {
  int64_t batch, channels;
  int width;
  std::vector<int64_t> lengths;  // of packed sequences; one: of each of the batch
  bool silu, bias, initial;

  bool packed() const { return lengths.size() > 1; }
  int64_t count() const { return packed() ? static_cast<int64_t>(lengths.size()) : batch; }
};

double act(bool silu, double y) { return silu ? y / (1 + std::exp(-y)) : y; }
double slope(bool silu, double y) {
  const double s = 1 / (1 + std::exp(-y));
  return silu ? s * (1 + y * (1 - s)) : 1;
}

template <typename T>
void sequences(const Shape& shape) {
  const double slack = sizeof(T) == 8 ? 1e-13 : 2e-6;
  const int64_t channels = shape.channels, width = shape.width, before = width - 1;
  std::vector<int64_t> starts{0};
  for (const int64_t length : shape.lengths) starts.push_back(starts.back() + length);
  const int64_t tokens = starts.back(), stride = channels + 3, total = shape.batch * tokens;
  const auto x = drawn<T>(total * stride), weight = drawn<T>(channels * width), bias = drawn<T>(channels);
  const auto initial = drawn<T>(shape.count() * channels * before), grad_out = drawn<T>(total * channels);
  const auto grad_final = drawn<T>(initial.size());
  auto out = unwritten<T>(total * channels), states = unwritten<T>(initial.size());
  CausalConv1dInputs in{};
  in.x = x.data(), in.weight = weight.data(), in.bias = shape.bias ? bias.data() : nullptr;
  in.initial = shape.initial ? initial.data() : nullptr;
  in.x_batch_stride = tokens * stride, in.x_token_stride = stride;
  in.initial_strides = {channels * before, before, 1};
  in.batch_size = shape.batch, in.num_tokens = tokens, in.num_channels = channels;
  if (shape.packed()) in.cu_seqlens = {starts.data(), true};
  in.num_sequences = shape.count(), in.width = shape.width, in.silu = shape.silu, in.dtype = kType<T>;
  cpu::causal_conv1d<T>({in, out.data(), states.data()});

  auto grad_x = unwritten<T>(total * channels), grad_initial = unwritten<T>(initial.size());
  auto grad_weight = unwritten<T>(channels * width), grad_bias = unwritten<T>(channels);
  CausalConv1dBackwardParams p{};
  p.in = in, p.grad_out = grad_out.data(), p.grad_final = grad_final.data();
  p.grad_x = grad_x.data(), p.grad_weight = grad_weight.data(), p.grad_bias = grad_bias.data();
  p.grad_initial = grad_initial.data();
  p.part_tokens = cpu::causal_conv1d_part_tokens(in);
  p.num_parts = shape.batch * ((tokens + p.part_tokens - 1) / p.part_tokens);
  std::vector<double> parts(p.num_parts * (width + 1) * channels);
  p.parts = parts.data();
  cpu::causal_conv1d_backward<T>(p);

  for (int64_t c = 0; c < channels; ++c) {
    std::vector<double> sums(width + 1), sizes(width + 1);
    for (int64_t n = 0; n < shape.count(); ++n) {
      const int64_t begin = shape.packed() ? starts[n] : 0, length = shape.lengths[shape.packed() ? n : 0];
      const int64_t row = (shape.packed() ? 0 : n * tokens) + begin, state = (n * channels + c) * before;
      // Times -before ... length - 1: x, and what its gradient is with the sizes of its terms.
      std::vector<double> times(before + length), grads(times.size()), terms(times.size());
      for (int64_t i = 0; i < before; ++i) times[i] = shape.initial ? value(initial[state + i]) : 0;
      for (int64_t t = 0; t < length; ++t) times[before + t] = value(x[(row + t) * stride + c]);
      for (int64_t t = 0; t < length; ++t) {
        double y = shape.bias ? value(bias[c]) : 0, size = std::fabs(y);
        for (int64_t j = 0; j < width; ++j) {
          const double term = value(weight[c * width + j]) * times[t + j];
          y += term, size += std::fabs(term);
        }
        const int64_t at = (row + t) * channels + c;
        check_rounded("out", at, out[at], act(shape.silu, y), slack, size);
        const double g = value(grad_out[at]) * slope(shape.silu, y),
                     error = std::fabs(value(grad_out[at])) * (1 + size);
        for (int64_t j = 0; j < width; ++j) {
          const double tap = value(weight[c * width + j]);
          grads[t + j] += g * tap, terms[t + j] += error * std::fabs(tap);
          sums[j] += g * times[t + j], sizes[j] += error * std::fabs(times[t + j]);
        }
        sums[width] += g, sizes[width] += error;
      }
      for (int64_t i = 0; i < before; ++i) {
        check("final_states", state + i, value(states[state + i]), times[length + i], 0);
        grads[length + i] += value(grad_final[state + i]), terms[length + i] += std::fabs(value(grad_final[state + i]));
      }
      for (int64_t i = 0; i < before; ++i)
        check_rounded("grad_initial", state + i, grad_initial[state + i], grads[i], slack, terms[i]);
      for (int64_t t = 0; t < length; ++t) {
        const int64_t at = (row + t) * channels + c;
        check_rounded("grad_x", at, grad_x[at], grads[before + t], slack, terms[before + t]);
      }
    }
    for (int64_t j = 0; j < width; ++j)
      check_rounded("grad_weight", c * width + j, grad_weight[c * width + j], sums[j], slack, sizes[j]);
    check_rounded("grad_bias", c, grad_bias[c], sums[width], slack, sizes[width]);
  }
}

template <typename T>
void step(int64_t channels, int width, int64_t length, int64_t tokens, bool ring) {
  const auto x = drawn<T>(4 * channels * tokens), weight = drawn<T>(channels * width),
             before = drawn<T>(6 * channels * length);
  auto states = before, out = unwritten<T>(x.size());
  const std::vector<int64_t> slots{5, -1, 0, 7};
  const std::vector<int32_t> from{static_cast<int32_t>(length + 1), 0, 3, 2};
  CausalConv1dUpdateParams p{};
  p.x = x.data(), p.states = states.data(), p.weight = weight.data(), p.out = out.data();
  p.x_strides = {channels * tokens, tokens, 1}, p.state_strides = {channels * length, 1, channels};
  p.batch_size = 4, p.num_channels = channels, p.num_tokens = tokens, p.num_slots = 6, p.state_length = length;
  p.slots = {slots.data(), true}, p.pad_slot = -1, p.width = width, p.silu = true, p.dtype = kType<T>;
  if (ring) p.cache_seqlens = {from.data(), false};
  cpu::causal_conv1d_update<T>(p);
  for (int64_t row = 0; row < 4; ++row) {
    const int64_t slot = slots[row];
    for (int64_t c = 0; c < channels; ++c) {
      const bool runs = slot >= 0 && slot < 6;
      const auto state = [&](const std::vector<T>& all, int64_t i) {
        return value(all[(slot * length + i) * channels + c]);
      };
      std::vector<double> times;
      for (int64_t i = 0; runs && i < length; ++i) times.push_back(state(before, ring ? (from[row] + i) % length : i));
      for (int64_t s = 0; s < tokens; ++s) {
        const int64_t at = (row * channels + c) * tokens + s;
        double y = 0, size = 1;
        if (runs) {
          times.push_back(value(x[at]));
          for (int j = 0; j < width; ++j) {
            const double term = value(weight[c * width + j]) * times[times.size() - width + j];
            y += term, size += std::fabs(term);
          }
        }
        check_rounded("out of a step", at, out[at], act(true, y), 2e-6, size);
      }
      for (int64_t i = 0; runs && i < length; ++i)
        check("state", c, state(states, ring ? (from[row] + tokens + i) % length : i), times[tokens + i], 0);
    }
  }
}

void run() {
  sequences<double>({2, 19, 4, {37}, true, true, true});
  sequences<float>({3, 530, 3, {140}, true, false, true});
  sequences<half_t>({1, 33, 2, {7, 0, 1, 130, 2}, false, true, true});
  sequences<bfloat16_t>({1, 17, 4, {1, 2, 0, 3, 150}, true, true, false});
  sequences<float>({1, 40, 4, {2, 1, 9}, false, false, true});
  step<float>(37, 4, 3, 1, false), step<half_t>(24, 3, 4, 2, false), step<bfloat16_t>(24, 2, 5, 3, true);
}
