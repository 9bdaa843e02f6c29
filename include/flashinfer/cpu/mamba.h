// Step of Mamba's state space model on the CPU. A task is a head of a sequence. It reads and writes the state
// once.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include <flashinfer/common/mamba.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

inline float number_at(const StridedNumbers& numbers, int64_t at) {
  if (numbers.dtype == DType::kFloat32) return static_cast<const float*>(numbers.data)[at];
  if (numbers.dtype == DType::kFloat16) return to_float(static_cast<const half_t*>(numbers.data)[at]);
  return to_float(static_cast<const bfloat16_t*>(numbers.data)[at]);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Store a row of a state as integers with a scale.
inline void store_scaled_row(int16_t* to, float* scale, const float* row, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude_in_row(row[i]));
  const RowScale of(largest);
  *scale = of.scale;
  for (int64_t i = 0; i < n; ++i)
    to[i] = of.inverse == 0 ? int16_t{0} : static_cast<int16_t>(std::lrint(row[i] * of.inverse));
}

// Store a row of a state. `element` is the index of its first element in the pool, for random numbers.
template <typename S>
void store_state_row(const StateUpdateParams& p, S* to, const float* row, int64_t element, int64_t t) {
  const int64_t n = p.state_size;
  if (std::is_same_v<S, float> || !p.seed) {
    for_lanes(n, [&](int64_t i, int count) { store(to + i, load(row + i, count), count); });
    return;
  }
  PhiloxBlock words{};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = element + i;
    if (i == 0 || at % 4 == 0) words = rounding_words(static_cast<uint64_t>(*p.seed), at / 4, t, p.rounds);
    const uint32_t word = words.words[at % 4];
    if constexpr (std::is_same_v<S, half_t>) to[i] = from_float<S>(stochastic_half(row[i], word));
    if constexpr (std::is_same_v<S, bfloat16_t>) to[i] = from_float<S>(stochastic_bfloat16(row[i], word));
  }
}

// Task: one head of one sequence.
template <typename T, typename S>
class StateUpdate {
 public:
  StateUpdate(const StateUpdateParams& p, int64_t n, int64_t head)
      : p_(p), n_(n), head_(head), group_(head / (p.num_heads / p.num_groups)), tokens_(p, n) {}

  void run() {
    const int64_t size = p_.state_size, count = tokens_.end - tokens_.begin;
    padded_ = (size + kLanes - 1) / kLanes * kLanes;
    b_.assign(count * padded_, 0), c_.assign(count * padded_, 0);
    for (int64_t i = 0; i < count; ++i) {
      const T* b = static_cast<const T*>(p_.b.data) + p_.b.at(tokens_.batch, tokens_.begin + i, group_);
      const T* c = static_cast<const T*>(p_.c.data) + p_.c.at(tokens_.batch, tokens_.begin + i, group_);
      for_lanes(size, [&](int64_t k, int lanes) {
        store(&b_[i * padded_ + k], load(b + k, lanes));
        store(&c_[i * padded_ + k], load(c + k, lanes));
      });
    }
    one_decay_ = p_.one_decay();
    step_.resize(count), decay_.resize(count);
    for (int64_t i = 0; one_decay_ && i < count; ++i) {
      step_[i] = step(tokens_.begin + i, 0);
      decay_[i] = std::exp(step_[i] * number_at(p_.a, head_ * p_.a.strides[0]));
    }
    row_.assign(padded_, 0);
    for (int64_t row = 0; row < p_.dim; ++row) update(row);
  }

 private:
  T* out(int64_t t) const {
    return static_cast<T*>(const_cast<void*>(p_.out.data)) + p_.out.at(tokens_.batch, t, head_);
  }

  float step(int64_t t, int64_t row) const {
    const auto& s = p_.dt.strides;
    float dt = number_at(p_.dt, tokens_.batch * s[0] + t * s[1] + head_ * s[2] + row * s[3]);
    if (p_.bias.data) dt += number_at(p_.bias, head_ * p_.bias.strides[0] + row * p_.bias.strides[1]);
    return p_.softplus ? softplus(dt) : dt;
  }

  vfloat decays(int64_t row, int64_t k, float step) const {
    const auto& s = p_.a.strides;
    float values[kLanes] = {};
    for (int64_t i = 0; i < kLanes && k + i < p_.state_size; ++i)
      values[i] = step * number_at(p_.a, head_ * s[0] + row * s[1] + (k + i) * s[2]);
    return exp(-max(splat(-88.0f), -max(splat(-87.0f), load(values))));
  }

  // Load a row of the state before the first token. Padding starts from zeros.
  void load_row(int64_t row, int64_t at) {
    if (tokens_.slot < 0) return std::fill(row_.begin(), row_.end(), 0.0f);
    const S* from = static_cast<const S*>(p_.state) + tokens_.slot * p_.slot_stride + at;
    if constexpr (std::is_same_v<S, int16_t>) {
      const float scale = *p_.scales.at(tokens_.slot, head_, row);
      for (int64_t k = 0; k < p_.state_size; ++k) row_[k] = static_cast<float>(from[k]) * scale;
    } else {
      for_lanes(p_.state_size, [&](int64_t k, int lanes) { store(&row_[k], load(from + k, lanes)); });
    }
  }

  void store_row(S* to, const StateScales& scales, int64_t slot, int64_t head, int64_t row, int64_t element,
                 int64_t t) {
    if constexpr (std::is_same_v<S, int16_t>)
      store_scaled_row(to, scales.at(slot, head, row), row_.data(), p_.state_size);
    else
      store_state_row(p_, to, row_.data(), element, t);
  }

  void update(int64_t row) {
    const int64_t size = p_.state_size, at = head_ * p_.head_size() + row * size;
    load_row(row, at);
    const int64_t element = tokens_.slot * p_.num_heads * p_.head_size() + at;
    const float d = p_.d.data ? number_at(p_.d, head_ * p_.d.strides[0] + row * p_.d.strides[1]) : 0.0f;
    for (int64_t t = tokens_.begin; t < tokens_.end; ++t) {
      const int64_t i = t - tokens_.begin;
      const float x = to_float((static_cast<const T*>(p_.x.data) + p_.x.at(tokens_.batch, t, head_))[row]);
      const float dt = one_decay_ ? step_[i] : step(t, row), input = dt * x;
      vfloat total{};
      for (int64_t k = 0; k < padded_; k += kLanes) {
        const vfloat decay = one_decay_ ? splat(decay_[i]) : decays(row, k, dt);
        const vfloat s = load(&row_[k]) * decay + load(&b_[i * padded_ + k]) * input;
        store(&row_[k], s);
        total += s * load(&c_[i * padded_ + k]);
      }
      float y = sum(total) + d * x;
      if (p_.z.data) {
        const float z = to_float((static_cast<const T*>(p_.z.data) + p_.z.at(tokens_.batch, t, head_))[row]);
        y *= z / (1.0f + std::exp(-z));
      }
      out(t)[row] = from_float<T>(y);
      const int64_t to = tokens_.slot_after(p_, n_, t);
      if (to >= 0)
        store_row(static_cast<S*>(p_.state) + to * p_.slot_stride + at, p_.scales, to, head_, row, element, i);
      const int64_t history = tokens_.history_after(p_, t, head_);
      if (history >= 0)
        store_row(static_cast<S*>(p_.history) + history * p_.head_size() + row * size, p_.history_scales, history, 0,
                  row, element, i);
    }
  }

  const StateUpdateParams& p_;
  int64_t n_, head_, group_, padded_ = 0;
  StateSequence tokens_;
  bool one_decay_ = false;
  std::vector<float> b_, c_, row_, step_, decay_;
};

template <typename T>
void selective_state_update(const StateUpdateParams& p) {
  const auto all = [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    const int64_t bytes = 2 * p.head_size() * static_cast<int64_t>(sizeof(S));
    parallel_rows(p.num_sequences * p.num_heads, bytes, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task)
        StateUpdate<T, S>(p, task / p.num_heads, task % p.num_heads).run();
    });
  };
  if (p.state_dtype == DType::kFloat32) return all(static_cast<float*>(nullptr));
  if (p.state_dtype == DType::kFloat16) return all(static_cast<half_t*>(nullptr));
  if (p.state_dtype == DType::kInt16) return all(static_cast<int16_t*>(nullptr));
  all(static_cast<bfloat16_t*>(nullptr));
}

}  // namespace flashinfer::cpu
