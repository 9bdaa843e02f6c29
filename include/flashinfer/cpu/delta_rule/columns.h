// Shared parts of the delta rule on the CPU: 32 columns of a head's state, rows of tokens, factors of a
// token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include <flashinfer/common/delta_rule.h>
#include <flashinfer/cpu/simd/lanes.h>
#include <flashinfer/cpu/simd/transpose.h>

namespace flashinfer::cpu {

// Columns of V are independent. 32 of them with 128 rows take 16 KB, and stay in the L1 cache.
constexpr int kDeltaColumns = 32;

// Vectors of the state type, which is double if q is double, otherwise float.
template <typename S>
struct StateLanes {
  using V = vfloat;
  static constexpr int kCount = kLanes;
  static V splat(float value) { return V{} + value; }
};
template <>
struct StateLanes<double> {
  using V = vdouble;
  static constexpr int kCount = kWideLanes;
  static V splat(double value) { return V{} + value; }
};
template <typename T>
using StateOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename S>
struct alignas(64) Columns {
  using V = typename StateLanes<S>::V;
  static constexpr int kLane = StateLanes<S>::kCount, kParts = kDeltaColumns / kLane;
  V part[kParts];

  void clear() {
    for (V& one : part) one = V{};
  }
  S sum() const {
    V total = part[0];
    for (int i = 1; i < kParts; ++i) total += part[i];
    S result = 0;
    for (int lane = 0; lane < kLane; ++lane) result += total[lane];
    return result;
  }
  // this += other * factor
  void add(const Columns& other, S factor) {
    for (int i = 0; i < kParts; ++i) part[i] += other.part[i] * factor;
  }
  void scale(S factor) {
    for (V& one : part) one *= factor;
  }
};

template <typename S>
Columns<S> product(const Columns<S>& a, const Columns<S>& b) {
  Columns<S> result;
  for (int i = 0; i < Columns<S>::kParts; ++i) result.part[i] = a.part[i] * b.part[i];
  return result;
}

// Adds to sums[d] the sum over the lanes of at(d), for each of `count` rows. at(d) returns the products of
// row d.
template <typename S, typename Row>
void row_sums_into(int64_t count, S* sums, const Row& at) {
  int64_t d = 0;
  if constexpr (std::is_same_v<S, float>) {
    for (; d + kLanes <= count; d += kLanes) {
      vfloat rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = at(d + i);
      store(sums + d, load_raw<vfloat>(sums + d) + sums_of(rows));
    }
  }
  for (; d < count; ++d) {
    const auto row = at(d);
    S total = 0;
    for (int lane = 0; lane < Columns<S>::kLane; ++lane) total += row[lane];
    sums[d] += total;
  }
}

template <typename S>
auto dot_parts(const Columns<S>& a, const Columns<S>& b) {
  auto total = a.part[0] * b.part[0];
  for (int i = 1; i < Columns<S>::kParts; ++i) total += a.part[i] * b.part[i];
  return total;
}

// ---- rows of tokens ------------------------------------------------------------------------------

template <typename S, typename T>
void load_row(const T* from, int64_t count, S* to) {
  if constexpr (std::is_same_v<S, T>) {
    std::memcpy(to, from, count * sizeof(S));
  } else {
    for_lanes(count, [&](int64_t i, int n) { store(to + i, load(from + i, n), n); });
  }
}

template <typename S, typename T>
void store_row(T* to, const S* from, int64_t count) {
  if constexpr (std::is_same_v<S, T>) {
    std::memcpy(to, from, count * sizeof(S));
  } else {
    for_lanes(count, [&](int64_t i, int n) { store(to + i, load(from + i, n), n); });
  }
}

// Elements beyond `count` are zeros.
template <typename S, typename T>
Columns<S> load_columns(const T* from, int64_t count) {
  alignas(64) S row[kDeltaColumns] = {};
  load_row(from, std::min<int64_t>(count, kDeltaColumns), row);
  Columns<S> result;
  std::memcpy(&result, row, sizeof(row));
  return result;
}

template <typename S, typename T>
void store_columns(T* to, const Columns<S>& columns, int64_t count) {
  alignas(64) S row[kDeltaColumns];
  std::memcpy(row, &columns, sizeof(row));
  store_row(to, row, std::min<int64_t>(count, kDeltaColumns));
}

template <typename S>
S dot(const S* a, const S* b, int64_t count) {
  S total = 0;
  if constexpr (std::is_same_v<S, float>) {
    vfloat sums{};
    for_lanes(count, [&](int64_t i, int n) { sums += load(a + i, n) * load(b + i, n); });
    total = cpu::sum(sums);
  } else {
    for (int64_t i = 0; i < count; ++i) total += a[i] * b[i];
  }
  return total;
}

// Return 1 / sqrt(sum x^2 + 1e-6).
template <typename S>
S l2_factor(const S* row, int64_t count) {
  return 1 / std::sqrt(dot(row, row, count) + static_cast<S>(1e-6));
}

// Write the gradient of a row of q or k. If the kernel normalises, y = x f has dx = f (dy - y <y, dy>).
// `grad` may be overwritten, and `scratch` is as long as a row.
template <typename S, typename T>
void store_row_gradient(const DeltaRuleInputs& in, const T* raw, const S* y, S* grad, S* scratch, T* to) {
  if (in.l2norm) {
    load_row(raw, in.key_dim, scratch);
    const S factor = l2_factor(scratch, in.key_dim), y_dot_grad = dot(y, grad, in.key_dim);
    for (int64_t d = 0; d < in.key_dim; ++d) grad[d] = factor * (grad[d] - y[d] * y_dot_grad);
  }
  store_row(to, grad, in.key_dim);
}

// ---- states --------------------------------------------------------------------------------------

// Call body(pointer) with a null pointer, whose type is that of the state in memory.
template <typename S, typename Body>
void with_state_type(DType dtype, const Body& body) {
  if constexpr (std::is_same_v<S, double>) {
    body(static_cast<double*>(nullptr));
  } else {
    if (dtype == DType::kFloat32) return body(static_cast<float*>(nullptr));
    if (dtype == DType::kFloat16) return body(static_cast<half_t*>(nullptr));
    body(static_cast<bfloat16_t*>(nullptr));
  }
}

// Load and store columns [first, first + count) of a head. `head` counts over all slots. A null tensor is
// loaded as zeros.
template <typename S>
void load_state(const DeltaRuleInputs& in, const void* states, DType dtype, int64_t head, int64_t first, int64_t count,
                Columns<S>* rows) {
  for (int64_t d = 0; d < in.key_dim; ++d) rows[d].clear();
  if (!states) return;
  const int64_t start = head * in.state_size() + first * in.column_stride();
  with_state_type<S>(dtype, [&](auto* type) {
    const auto* from = static_cast<decltype(type)>(const_cast<void*>(states)) + start;
    if (!in.v_first) {
      for (int64_t d = 0; d < in.key_dim; ++d) rows[d] = load_columns<S>(from + d * in.value_dim, count);
      return;
    }
    if constexpr (std::is_same_v<S, float>) {
      for (int64_t first_lane = 0; first_lane < count; first_lane += kLanes)
        for_lanes(in.key_dim, [&](int64_t d, int n) {
          vfloat block[kLanes];
          for (int64_t lane = 0; lane < kLanes; ++lane) {
            const int64_t c = first_lane + lane;
            block[lane] = c < count ? load(from + c * in.key_dim + d, n) : vfloat{};
          }
          transpose(block);
          for (int i = 0; i < n; ++i) store(reinterpret_cast<float*>(rows + d + i) + first_lane, block[i]);
        });
    } else {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t d = 0; d < in.key_dim; ++d) reinterpret_cast<S*>(rows + d)[c] = from[c * in.key_dim + d];
    }
  });
}

template <typename S>
void store_state(const DeltaRuleInputs& in, void* states, DType dtype, int64_t head, int64_t first, int64_t count,
                 const Columns<S>* rows) {
  const int64_t start = head * in.state_size() + first * in.column_stride();
  with_state_type<S>(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(states) + start;
    if (!in.v_first) {
      for (int64_t d = 0; d < in.key_dim; ++d) store_columns(to + d * in.value_dim, rows[d], count);
      return;
    }
    if constexpr (std::is_same_v<S, float>) {
      for (int64_t first_lane = 0; first_lane < count; first_lane += kLanes)
        for_lanes(in.key_dim, [&](int64_t d, int n) {
          vfloat block[kLanes];
          for (int i = 0; i < kLanes; ++i)
            block[i] = i < n ? load(reinterpret_cast<const float*>(rows + d + i) + first_lane) : vfloat{};
          transpose(block);
          for (int64_t lane = 0; lane < kLanes && first_lane + lane < count; ++lane)
            store(to + (first_lane + lane) * in.key_dim + d, block[lane], n);
        });
    } else {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t d = 0; d < in.key_dim; ++d) to[c * in.key_dim + d] = reinterpret_cast<const S*>(rows + d)[c];
    }
  });
}

// ---- a token -------------------------------------------------------------------------------------

// Rows of a token that a value head reads, converted to the state type.
template <typename T>
class TokenRows {
 public:
  using S = StateOf<T>;

  TokenRows(const DeltaRuleInputs& in, int64_t value_head)
      : in_(in), value_head_(value_head), head_(value_head / in.group()) {}

  const T* raw_query(int64_t b, int64_t t) const {
    return static_cast<const T*>(in_.q) + in_.q_strides.at(b, t, head_);
  }
  const T* raw_key(int64_t b, int64_t t) const { return static_cast<const T*>(in_.k) + in_.k_strides.at(b, t, head_); }
  void query(int64_t b, int64_t t, S* to) const { normed(raw_query(b, t), to); }
  void key(int64_t b, int64_t t, S* to) const { normed(raw_key(b, t), to); }
  const T* value(int64_t b, int64_t t) const {
    return static_cast<const T*>(in_.v) + in_.v_strides.at(b, t, value_head_);
  }
  // Index of the token and value head in contiguous tensors [B, T, HV, ...].
  int64_t number(int64_t b, int64_t t) const { return (b * in_.num_tokens + t) * in_.num_value_heads + value_head_; }
  // Compute the decays of all channels d: exp(g + channel_gate(gk, d)), or exp(g) without gk.
  template <typename ChannelGate>
  void decays(int64_t b, int64_t t, S g, S* to, const ChannelGate& channel_gate) const {
    const S* gk = static_cast<const S*>(in_.gk);
    if (!gk) {
      std::fill_n(to, in_.key_dim, std::exp(g));
    } else {
      gk += number(b, t) * in_.key_dim;
      for (int64_t d = 0; d < in_.key_dim; ++d) to[d] = std::exp(g + channel_gate(gk[d], d));
    }
  }
  void decays(int64_t b, int64_t t, S g, S* to) const {
    decays(b, t, g, to, [](S gk, int64_t) { return gk; });
  }
  S gate(int64_t b, int64_t t) const { return in_.g ? static_cast<const S*>(in_.g)[number(b, t)] : S(0); }
  // Return true if the gate leaves less of a state than its rounding error. The gradient <dS, e^g S> of that
  // gate is then 0, and the sums of gate gradients restart.
  bool forgets(int64_t b, int64_t t) const { return gate(b, t) < (std::is_same_v<S, double> ? -60 : -25); }
  S scalar_beta(int64_t b, int64_t t) const {
    return in_.beta && !in_.beta_is_vector ? static_cast<const S*>(in_.beta)[number(b, t)] : S(1);
  }
  // Return beta of some columns, or `scalar` for all.
  Columns<S> beta(int64_t b, int64_t t, int64_t first, int64_t count, S scalar) const {
    if (in_.beta_is_vector)
      return load_columns<S>(static_cast<const S*>(in_.beta) + number(b, t) * in_.value_dim + first, count);
    Columns<S> result;
    for (auto& part : result.part) part = StateLanes<S>::splat(scalar);
    return result;
  }

 private:
  void normed(const T* row, S* to) const {
    load_row(row, in_.key_dim, to);
    if (!in_.l2norm) return;
    const S factor = l2_factor(to, in_.key_dim);
    for (int64_t d = 0; d < in_.key_dim; ++d) to[d] *= factor;
  }

  const DeltaRuleInputs& in_;
  int64_t value_head_, head_;
};

}  // namespace flashinfer::cpu
