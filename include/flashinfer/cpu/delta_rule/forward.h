// The token-by-token delta rule on the CPU: 32 columns of a head's state stay in the L1 cache, with one pass
// over them per token.
#pragma once

#include <flashinfer/cpu/delta_rule/chunk_forward.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

// Compute g, gk and beta of a token from raw values.
template <typename S>
struct StepGate {
  const DeltaRuleParams& p;
  int64_t value_head;

  S gate(S g) const { return p.a_log && !p.raw_gk ? logarithm(g, value_head) : g; }
  S channel_gate(S g, int64_t d) const { return p.raw_gk ? logarithm(g, value_head * p.in.key_dim + d) : g; }
  // Return the logarithm of the decay. `bias` is the index of its bias.
  S logarithm(S g, int64_t bias) const {
    const S rate = std::exp(static_cast<S>(p.a_log[value_head]));
    const S x = g + (p.dt_bias ? static_cast<S>(p.dt_bias[bias]) : S(0));
    if (p.lower_bound < 0) return static_cast<S>(p.lower_bound) / (1 + std::exp(-rate * x));
    return -rate * (x > 20 ? x : std::log1p(std::exp(x)));
  }
  S beta(S beta) const { return p.beta_sigmoid ? p.beta_sigmoid / (1 + std::exp(-beta)) : beta; }
};

template <typename T>
class DeltaRuleScan {
 public:
  using S = StateOf<T>;

  explicit DeltaRuleScan(const DeltaRuleParams& p)
      : p_(p), in_(p.in), state_(p.in.key_dim), numbers_(5 * p.in.key_dim), scale_(static_cast<S>(p.in.scale.get())) {}

  // Compute columns [first, first + 32) of one value head of sequence n.
  void run(int64_t n, int64_t value_head, int64_t first) {
    const Sequence tokens = sequence_of(in_, n);
    const int64_t count = std::min<int64_t>(kDeltaColumns, in_.value_dim - first);
    const int64_t slot = p_.slots.data ? p_.slots[n] : n;
    const int64_t to_slot = p_.output_slots.data ? p_.output_slots[n] : slot;
    const TokenRows<T> rows(in_, value_head);
    const StepGate<S> step{p_, value_head};
    T* o = static_cast<T*>(p_.o) + first;
    if (slot < 0 || slot >= p_.num_slots) {
      for (int64_t t = tokens.begin; t < tokens.end; ++t)
        store_columns(o + rows.number(tokens.batch, t) * in_.value_dim, Columns<S>{}, count);
      return;
    }
    load_state(in_, p_.initial_slot(slot), p_.state_dtype, value_head, first, count, state_.data());
    S *q = numbers_.data(), *k = q + in_.key_dim, *next = k + in_.key_dim;
    S *decay = next + in_.key_dim, *next_decay = decay + in_.key_dim;
    Columns<S> prediction{};
    // Load the key and decays of a token, which the prediction from the previous state needs.
    const auto load_token = [&](int64_t t, S* key, S* decay) {
      rows.key(tokens.batch, t, key);
      rows.decays(tokens.batch, t, step.gate(rows.gate(tokens.batch, t)), decay,
                  [&](S g, int64_t d) { return step.channel_gate(g, d); });
    };
    if (tokens.begin < tokens.end) {
      load_token(tokens.begin, k, decay);
      for (int64_t d = 0; d < in_.key_dim; ++d) prediction.add(state_[d], decay[d] * k[d]);
    }
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      const int64_t number = rows.number(tokens.batch, t);
      rows.query(tokens.batch, t, q);
      Columns<S> u = load_columns<S>(rows.value(tokens.batch, t) + first, count);
      u.add(prediction, -1);
      u = product(u, rows.beta(tokens.batch, t, first, count, step.beta(rows.scalar_beta(tokens.batch, t))));
      const bool last = t + 1 == tokens.end;
      if (!last) load_token(t + 1, next, next_decay);
      Columns<S> out = last ? pass<true>(q, k, decay, next, next_decay, u, prediction)
                            : pass<false>(q, k, decay, next, next_decay, u, prediction);
      out.scale(scale_);
      store_columns(o + number * in_.value_dim, out, count);
      std::swap(k, next), std::swap(decay, next_decay);
      if (p_.snapshots)
        store_state(in_, p_.snapshots, p_.state_dtype,
                    (n * p_.snapshot_rows + t - tokens.begin) * in_.num_value_heads + value_head, first, count,
                    state_.data());
      if (const int64_t row = p_.checkpoint_row(n, t + 1 - tokens.begin); row >= 0)
        store_state(in_, p_.checkpoints, p_.checkpoint_dtype, row * in_.num_value_heads + value_head, first, count,
                    state_.data());
    }
    if (p_.final_state && to_slot >= 0 && to_slot < p_.num_slots)
      store_state(in_, p_.final_slot(to_slot), p_.state_dtype, value_head, first, count, state_.data());
  }

 private:
  // Update the state with a token, and compute the next token's prediction while a row is in registers.
  template <bool kLast>
  Columns<S> pass(const S* q, const S* k, const S* decay, const S* next, const S* next_decay, const Columns<S>& u,
                  Columns<S>& prediction) {
    constexpr int kParts = Columns<S>::kParts;
    Columns<S> out{}, read{};
    for (int64_t d = 0; d < in_.key_dim; ++d) {
      Columns<S>& row = state_[d];
      for (int i = 0; i < kParts; ++i) {
        const auto x = row.part[i] * decay[d] + u.part[i] * k[d];
        row.part[i] = x;
        out.part[i] += x * q[d];
        if constexpr (!kLast) read.part[i] += x * (next[d] * next_decay[d]);
      }
    }
    prediction = read;
    return out;
  }

  const DeltaRuleParams& p_;
  const DeltaRuleInputs& in_;
  std::vector<Columns<S>> state_;
  std::vector<S> numbers_;
  S scale_;
};

template <typename T>
void delta_rule(const DeltaRuleParams& p) {
  if constexpr (!std::is_same_v<T, double>) {
    const bool steps = p.slots.data || p.output_slots.data || p.a_log || p.beta_sigmoid || p.snapshots;
    if (!steps && p.state_dtype == DType::kFloat32 && supports_chunks<T>(p.in)) return delta_rule_chunks<T>(p);
  }
  const int64_t slices = (p.in.value_dim + kDeltaColumns - 1) / kDeltaColumns, heads = p.in.num_value_heads;
  parallel_tasks(p.in.num_sequences * heads * slices, [&](auto next) {
    DeltaRuleScan<T> scan(p);
    const int64_t tasks = p.in.num_sequences * heads * slices;
    for (int64_t task = next(); task < tasks; task = next())
      scan.run(task / slices / heads, task / slices % heads, task % slices * kDeltaColumns);
  });
}

}  // namespace flashinfer::cpu
