// Mamba's step over sequences: slots, states between tokens, one decay of a head or one of each element.
#include <flashinfer/cpu/mamba.h>

#include "harness.h"

using namespace driver;

struct Shape {
  int64_t batch, tokens, heads, groups, dim, size;
  bool one_decay, softplus, gate;
};

template <typename T, typename S>
void steps(const Shape& s) {
  const int64_t b = s.batch, t = s.tokens, h = s.heads, in_head = s.dim * s.size, slots = b + 2;
  const auto x = drawn<T>(b * t * h * s.dim), z = drawn<T>(b * t * h * s.dim);
  const auto bs = drawn<T>(b * t * s.groups * s.size), cs = drawn<T>(b * t * s.groups * s.size);
  const int64_t rows = s.one_decay ? 1 : s.dim, elements = s.one_decay ? 1 : s.size;
  const auto dt = drawn<T>(b * t * h * rows, 0.5), bias = drawn<T>(h * rows, 0.5);
  auto a = drawn<float>(h * rows * elements), d = drawn<float>(h * rows);
  for (float& one : a) one = -std::fabs(one);
  const auto first = drawn<S>(slots * h * in_head);
  auto state = first;
  auto history = unwritten<S>(b * (t + 1) * h * in_head);
  auto out = unwritten<T>(b * t * h * s.dim);
  std::vector<int32_t> from(b);
  std::vector<int64_t> numbers(b);
  for (int64_t n = 0; n < b; ++n) from[n] = static_cast<int32_t>((n + 1) % b), numbers[n] = b - 1 - n;
  from[0] = -1;

  StateUpdateParams p{};
  p.state = state.data(), p.state_dtype = kType<S>, p.num_slots = slots, p.slot_stride = h * in_head;
  p.x = {x.data(), t * h * s.dim, h * s.dim, s.dim}, p.out = {out.data(), t * h * s.dim, h * s.dim, s.dim};
  if (s.gate) p.z = {z.data(), t * h * s.dim, h * s.dim, s.dim};
  p.b = {bs.data(), t * s.groups * s.size, s.groups * s.size, s.size}, p.c = p.b, p.c.data = cs.data();
  p.dt = {dt.data(), kType<T>, {t * h * rows, h * rows, rows, s.one_decay ? 0 : 1}};
  p.a = {a.data(), DType::kFloat32, {rows * elements, s.one_decay ? 0 : elements, s.one_decay ? 0 : 1}};
  p.d = {d.data(), DType::kFloat32, {rows, s.one_decay ? 0 : 1}};
  p.bias = {bias.data(), kType<T>, {rows, s.one_decay ? 0 : 1}};
  p.softplus = s.softplus, p.update = true;
  p.batch_size = b, p.num_tokens = t, p.num_heads = h, p.num_groups = s.groups, p.dim = s.dim, p.state_size = s.size;
  p.num_sequences = b, p.pad_slot = -1, p.dtype = kType<T>, p.rounds = 10;
  p.slots = {from.data(), false, 1, 1};
  p.history = history.data(), p.history_slots = b, p.history_steps = t + 1;
  p.history_indices = {numbers.data(), true, 1, 1};
  cpu::selective_state_update<T>(p);

  constexpr double kError = 3e-6;
  for (int64_t n = 0; n < b; ++n)
    for (int64_t head = 0; head < h; ++head)
      for (int64_t row = 0; row < s.dim; ++row) {
        const int64_t slot = from[n], at = (head * s.dim + row) * s.size, r = s.one_decay ? 0 : row;
        std::vector<double> now(s.size);
        for (int64_t k = 0; slot >= 0 && k < s.size; ++k) now[k] = value(first[slot * h * in_head + at + k]);
        for (int64_t i = 0; i < t; ++i) {
          const int64_t token = n * t + i, group = head / (h / s.groups), to = (token * h + head) * s.dim + row;
          double step = value(dt[(token * h + head) * rows + r]) + value(bias[head * rows + r]), y = 0, size = 1;
          if (s.softplus) step = std::log1p(std::exp(step));
          for (int64_t k = 0; k < s.size; ++k) {
            const double decay = std::exp(step * a[(head * rows + r) * elements + (s.one_decay ? 0 : k)]);
            now[k] = now[k] * decay + step * value(x[to]) * value(bs[(token * s.groups + group) * s.size + k]);
            const double term = now[k] * value(cs[(token * s.groups + group) * s.size + k]);
            y += term, size += std::fabs(term);
          }
          y += d[head * rows + r] * value(x[to]);
          const double gate = value(z[to]), factor = s.gate ? gate / (1 + std::exp(-gate)) : 1;
          check_rounded("out", to, out[to], y * factor, kError, size * (1 + std::fabs(factor)));
          if (slot < 0) continue;
          const int64_t kept = (numbers[n] * (t + 1) + i) * h * in_head + at;
          for (int64_t k = 0; k < s.size; ++k)
            check_rounded("history", kept + k, history[kept + k], now[k], kError, 1 + std::fabs(now[k]));
        }
        for (int64_t k = 0; slot >= 0 && k < s.size; ++k)
          check_rounded("state", slot * h * in_head + at + k, state[slot * h * in_head + at + k], now[k], kError,
                        1 + std::fabs(now[k]));
      }
  for (int64_t i = b * h * in_head; i < slots * h * in_head; ++i)
    check("a slot of nobody", i, value(state[i]), value(first[i]), 0);
}

void run() {
  steps<float, float>({3, 2, 4, 2, 9, 24, true, true, true});
  steps<half_t, float>({2, 1, 2, 1, 16, 128, true, true, false});
  steps<bfloat16_t, bfloat16_t>({2, 3, 2, 2, 5, 40, false, false, true});
  steps<float, half_t>({2, 1, 1, 1, 7, 16, false, true, false});
}
