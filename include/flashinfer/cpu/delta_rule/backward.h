// Gradients of the token-by-token delta rule on the CPU. The forward pass saves nothing. Three passes over a
// sequence:
//   F, forward: r of each token again, and the last state S.
//   A, backward, from D = dL/dS of the last state:
//      D += s q do';  dy = D' k;  dv = beta dy;  D = a (D - k dv')
//   B, forward: dq = s S do;  dk = D u - S~ dv. A adds the first term.
// The gradient of a gate needs no state: dg_t = <dS, S>_T + sum over tokens from t on of <o, do> - <v, dv>.
// For one row d it is (dS S)_d + sum of q_d dq_d + k_d (row_d - column_d), with row = -S~ dv and column = D
// u.
#pragma once

#include <flashinfer/cpu/delta_rule/chunk_backward.h>

namespace flashinfer::cpu {

// One thread computes a head of q and k and its value heads, so the order of sums is fixed without atomics.
template <typename T>
class DeltaRuleGradient {
 public:
  using S = StateOf<T>;

  explicit DeltaRuleGradient(const DeltaRuleBackwardParams& p)
      : p_(p),
        in_(p.in),
        state_(p.in.key_dim),
        q_(p.in.key_dim),
        k_(p.in.key_dim),
        decay_(p.in.key_dim),
        row_(p.in.key_dim),
        scale_(static_cast<S>(p.in.scale.get())) {}

  void run(int64_t n, int64_t head) {
    const Sequence tokens = sequence_of(in_, n);
    const int64_t length = tokens.end - tokens.begin, keys = in_.key_dim, group = in_.group();
    dq_.assign(length * keys, 0), dk_.assign(length * keys, 0);
    for (int64_t value_head = head * group; value_head < (head + 1) * group; ++value_head) {
      const TokenRows<T> rows(in_, value_head);
      gate_.assign(length + 1, 0), dbeta_.assign(length, 0);
      if (p_.grad_gk) gk_.assign((length + 1) * keys, 0);
      for (int64_t first = 0; first < in_.value_dim; first += kDeltaColumns) {
        const Slice slice{n, value_head, first, std::min<int64_t>(kDeltaColumns, in_.value_dim - first), tokens};
        recompute(slice, rows);
        backward_pass(slice, rows);
        forward_pass(slice, rows);
      }
      write_gates(tokens, rows);
    }
    write_rows(tokens, TokenRows<T>(in_, head * group), head);
  }

 private:
  struct Slice {
    int64_t n, value_head, first, count;
    Sequence tokens;

    int64_t length() const { return tokens.end - tokens.begin; }
    int64_t state(const DeltaRuleInputs& in) const { return n * in.num_value_heads + value_head; }
  };

  static constexpr DType kState = std::is_same_v<S, double> ? DType::kFloat64 : DType::kFloat32;

  S* at(std::vector<S>& rows, int64_t i) const { return rows.data() + i * in_.key_dim; }

  Columns<S> beta(const Slice& s, const TokenRows<T>& rows, int64_t t) const {
    return rows.beta(s.tokens.batch, t, s.first, s.count, rows.scalar_beta(s.tokens.batch, t));
  }
  // Return s do of a token.
  Columns<S> scaled_grad(const Slice& s, const TokenRows<T>& rows, int64_t t) const {
    if (!p_.grad_o) return {};
    const T* from = static_cast<const T*>(p_.grad_o) + rows.number(s.tokens.batch, t) * in_.value_dim + s.first;
    Columns<S> result = load_columns<S>(from, s.count);
    result.scale(scale_);
    return result;
  }
  void load_token(const Slice& s, const TokenRows<T>& rows, int64_t t) {
    rows.key(s.tokens.batch, t, k_.data());
    rows.decays(s.tokens.batch, t, rows.gate(s.tokens.batch, t), decay_.data());
  }

  void recompute(const Slice& s, const TokenRows<T>& rows) {
    r_.resize(s.length());
    load_state(in_, p_.initial_state, kState, s.state(in_), s.first, s.count, state_.data());
    for (int64_t i = 0; i < s.length(); ++i) {
      const int64_t t = s.tokens.begin + i;
      load_token(s, rows, t);
      Columns<S> prediction{};
      for (int64_t d = 0; d < in_.key_dim; ++d) prediction.add(state_[d], decay_[d] * k_[d]);
      r_[i] = load_columns<S>(rows.value(s.tokens.batch, t) + s.first, s.count);
      r_[i].add(prediction, -1);
      const Columns<S> u = product(r_[i], beta(s, rows, t));
      for (int64_t d = 0; d < in_.key_dim; ++d) {
        state_[d].scale(decay_[d]);
        state_[d].add(u, k_[d]);
      }
    }
  }

  // Pass A. state_ has the last state.
  void backward_pass(const Slice& s, const TokenRows<T>& rows) {
    dv_.resize(s.length());
    grad_.resize(in_.key_dim);
    load_state(in_, p_.grad_state, kState, s.state(in_), s.first, s.count, grad_.data());
    for (int64_t d = 0; d < in_.key_dim; ++d) {
      const S share = product(grad_[d], state_[d]).sum();
      gate_[s.length()] += share;
      if (p_.grad_gk) at(gk_, s.length())[d] += share;
    }
    for (int64_t i = s.length() - 1; i >= 0; --i) {
      const int64_t t = s.tokens.begin + i;
      const Columns<S> go = scaled_grad(s, rows, t), betas = beta(s, rows, t), u = product(r_[i], betas);
      load_token(s, rows, t);
      rows.query(s.tokens.batch, t, q_.data());
      Columns<S> dy{};
      for (int64_t d = 0; d < in_.key_dim; ++d) {
        grad_[d].add(go, q_[d]);
        dy.add(grad_[d], k_[d]);
      }
      std::fill(row_.begin(), row_.end(), S(0));
      row_sums_into<S>(in_.key_dim, row_.data(), [&](int64_t d) { return dot_parts(grad_[d], u); });
      add_to_key(i, S(1));
      if (p_.grad_gk) add_to_gk(i, k_, S(-1));
      const Columns<S> dr = product(betas, dy), dbeta = product(dy, r_[i]);
      dv_[i] = dr;
      const Columns<S> v = load_columns<S>(rows.value(s.tokens.batch, t) + s.first, s.count);
      gate_[i] -= product(v, dr).sum();
      store_columns(static_cast<T*>(p_.grad_v) + rows.number(s.tokens.batch, t) * in_.value_dim + s.first, dr, s.count);
      if (p_.grad_beta && in_.beta_is_vector) {
        S* to = static_cast<S*>(p_.grad_beta) + rows.number(s.tokens.batch, t) * in_.value_dim + s.first;
        store_columns(to, dbeta, s.count);
      } else {
        dbeta_[i] += dbeta.sum();
      }
      for (int64_t d = 0; d < in_.key_dim; ++d) {
        grad_[d].add(dr, -k_[d]);
        grad_[d].scale(decay_[d]);
      }
    }
    store_state(in_, p_.grad_initial_state, kState, s.state(in_), s.first, s.count, grad_.data());
  }

  void forward_pass(const Slice& s, const TokenRows<T>& rows) {
    load_state(in_, p_.initial_state, kState, s.state(in_), s.first, s.count, state_.data());
    for (int64_t i = 0; i < s.length(); ++i) {
      const int64_t t = s.tokens.begin + i;
      load_token(s, rows, t);
      rows.query(s.tokens.batch, t, q_.data());
      for (int64_t d = 0; d < in_.key_dim; ++d) state_[d].scale(decay_[d]);
      std::fill(row_.begin(), row_.end(), S(0));
      row_sums_into<S>(in_.key_dim, row_.data(), [&](int64_t d) { return dot_parts(state_[d], dv_[i]); });
      add_to_key(i, S(-1));
      if (p_.grad_gk) add_to_gk(i, k_, S(-1));
      const Columns<S> u = product(r_[i], beta(s, rows, t)), go = scaled_grad(s, rows, t);
      for (int64_t d = 0; d < in_.key_dim; ++d) state_[d].add(u, k_[d]);
      std::fill(row_.begin(), row_.end(), S(0));
      row_sums_into<S>(in_.key_dim, row_.data(), [&](int64_t d) { return dot_parts(state_[d], go); });
      S share = 0;
      for (int64_t d = 0; d < in_.key_dim; ++d) at(dq_, i)[d] += row_[d], share += q_[d] * row_[d];
      gate_[i] += share;
      if (p_.grad_gk) add_to_gk(i, q_, S(1));
    }
  }

  void add_to_key(int64_t i, S sign) {
    for (int64_t d = 0; d < in_.key_dim; ++d) at(dk_, i)[d] += sign * row_[d];
  }
  void add_to_gk(int64_t i, const std::vector<S>& factor, S sign) {
    for (int64_t d = 0; d < in_.key_dim; ++d) at(gk_, i)[d] += sign * factor[d] * row_[d];
  }

  // Sums the gates of a value head from the last token to the first.
  void write_gates(const Sequence& tokens, const TokenRows<T>& rows) {
    const int64_t length = tokens.end - tokens.begin;
    for (int64_t i = length - 1; i >= 0; --i) {
      const int64_t number = rows.number(tokens.batch, tokens.begin + i);
      gate_[i] = rows.forgets(tokens.batch, tokens.begin + i) ? S(0) : gate_[i] + gate_[i + 1];
      if (p_.grad_g) static_cast<S*>(p_.grad_g)[number] = gate_[i];
      if (p_.grad_beta && !in_.beta_is_vector) static_cast<S*>(p_.grad_beta)[number] = dbeta_[i];
      if (!p_.grad_gk) continue;
      for (int64_t d = 0; d < in_.key_dim; ++d) at(gk_, i)[d] += at(gk_, i + 1)[d];
      std::copy_n(at(gk_, i), in_.key_dim, static_cast<S*>(p_.grad_gk) + number * in_.key_dim);
    }
  }

  // Write dq and dk of the head.
  void write_rows(const Sequence& tokens, const TokenRows<T>& rows, int64_t head) {
    for (int64_t i = 0; i < tokens.end - tokens.begin; ++i) {
      const int64_t t = tokens.begin + i;
      const int64_t at_row = ((tokens.batch * in_.num_tokens + t) * in_.num_heads + head) * in_.key_dim;
      const T *q = rows.raw_query(tokens.batch, t), *k = rows.raw_key(tokens.batch, t);
      rows.query(tokens.batch, t, q_.data());
      rows.key(tokens.batch, t, k_.data());
      store_row_gradient(in_, q, q_.data(), at(dq_, i), row_.data(), static_cast<T*>(p_.grad_q) + at_row);
      store_row_gradient(in_, k, k_.data(), at(dk_, i), row_.data(), static_cast<T*>(p_.grad_k) + at_row);
    }
  }

  const DeltaRuleBackwardParams& p_;
  const DeltaRuleInputs& in_;
  std::vector<Columns<S>> state_, grad_, r_, dv_;
  std::vector<S> q_, k_, decay_, row_;          // of a token
  std::vector<S> dq_, dk_, gate_, gk_, dbeta_;  // of a sequence
  S scale_;
};

template <typename T>
void delta_rule_backward(const DeltaRuleBackwardParams& p) {
  if constexpr (!std::is_same_v<T, double>)
    if (supports_chunks<T>(p.in)) return delta_chunks_backward<T>(p);
  const int64_t tasks = p.in.num_sequences * p.in.num_heads;
  parallel_tasks(tasks, [&](auto next) {
    DeltaRuleGradient<T> gradient(p);
    for (int64_t task = next(); task < tasks; task = next()) gradient.run(task / p.in.num_heads, task % p.in.num_heads);
  });
}

}  // namespace flashinfer::cpu
