// Gradients of the chunk form on the CPU, with chunks of sixteen tokens. Three passes per 32 columns of V:
//   F, forward: r of each token again, and the last state S.
//   A, backward, from D = dL/dS of the last state:
//      du = P' dO + e^(Gn-G) K D;  dy = du - Z' (beta du);  dR = beta dy = dV;
//      D = e^Gn D + scale Q' (e^G dO) - K' (e^G dR)
//   B, forward: dq += scale e^G dO S';  dk -= e^G dR S'. A adds e^(Gn-G) u D' to dk.
// Sums of dO u' and dR u' over all columns give the rest of dq and dk. The gradient of a gate needs no state:
// dg_t = <dS, S> of the last state + sum over tokens from t on of <q, dq> - <v, dv>.
#pragma once

#include <flashinfer/cpu/delta_rule/chunk.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

// One thread computes a head of q and k and its value heads, so the order of sums is fixed without atomics.
template <typename T>
class DeltaChunkGradient {
 public:
  explicit DeltaChunkGradient(const DeltaRuleBackwardParams& p)
      : p_(p),
        in_(p.in),
        pad_(round_up(static_cast<int>(p.in.key_dim), kChunk)),
        state_(kDeltaColumns * pad_),
        grad_(kDeltaColumns * pad_),
        scratch_(pad_),
        scale_(static_cast<float>(p.in.scale.get())) {}

  void run(int64_t n, int64_t head) {
    tokens_ = sequence_of(in_, n);
    const int64_t length = tokens_.end - tokens_.begin, group = in_.group();
    chunks_ = (length + kChunk - 1) / kChunk;
    dq_.resize(chunks_ * kChunk * pad_), dk_.resize(chunks_ * kChunk * pad_);
    load_rows(TokenRows<T>(in_, head * group));
    for (int64_t value_head = head * group; value_head < (head + 1) * group; ++value_head) {
      const TokenRows<T> rows(in_, value_head);
      prepare(rows);
      for (int64_t first = 0; first < in_.value_dim; first += kDeltaColumns) {
        const Panel panel{n * in_.num_value_heads + value_head, first,
                          std::min<int64_t>(kDeltaColumns, in_.value_dim - first)};
        recompute(panel, rows);
        dot_last_states(panel);
        backward_pass(panel, rows);
        forward_pass(panel);
      }
      add_within_chunks();
      write_gates(rows);
    }
    write_rows(head);
  }

 private:
  static constexpr int kPanelSize = kDeltaColumns * kChunk;  // [kDeltaColumns, kChunk]

  struct Panel {
    int64_t head, first, count;  // index of the head among all sequences, and its columns
  };

  // Copy the rows of a head next to each other. They are scattered in tensors, and each pass reads them.
  void load_rows(const TokenRows<T>& rows) {
    while (static_cast<int64_t>(rows_.size()) < chunks_) rows_.emplace_back(in_.key_dim, 1);
    for (int64_t c = 0; c < chunks_; ++c) {
      rows_[c].load(rows, tokens_, c);
      rows_[c].transpose_keys();
    }
  }

  // Load the factors of the tokens, and clear the sums.
  void prepare(const TokenRows<T>& rows) {
    factors_.resize(chunks_);
    gate_.assign(chunks_ * kChunk + 1, 0), dbeta_.assign(chunks_ * kChunk, 0);
    dp_.resize(chunks_ * ChunkFactors::kSquare), x_.resize(chunks_ * ChunkFactors::kSquare);
    v_.resize(chunks_ * kPanelSize), r_.resize(chunks_ * kPanelSize), grads_.resize(2 * chunks_ * kPanelSize);
    for (int64_t c = 0; c < chunks_; ++c) {
      ChunkRows<T>& chunk = rows_[c];
      factors_[c].load(rows, chunk.batch, chunk.first, chunk.count);
      factors_[c].correlate(pad_, chunk.k(), chunk.q(), chunk.keys(), scale_);
    }
  }

  // to = from * factor of the token
  static void scale_tokens(const float* from, const float* factor, float* to) {
    for (int at = 0; at < kPanelSize; at += kLanes) store(to + at, load(from + at) * load(factor + at % kChunk));
  }

  void recompute(const Panel& panel, const TokenRows<T>& rows) {
    alignas(64) float betas_r[kPanelSize];
    load_panel(in_, p_.initial_state, panel.head, panel.first, pad_, state_.data());
    for (int64_t c = 0; c < chunks_; ++c) {
      const ChunkFactors& f = factors_[c];
      ChunkRows<T>& chunk = rows_[c];
      float *v = v_.data() + c * kPanelSize, *r = r_.data() + c * kPanelSize;
      load_transposed(chunk.count, panel.count, v,
                      [&](int i) { return rows.value(chunk.batch, chunk.first + i) + panel.first; });
      multiply(kDeltaColumns, kChunk, pad_, {state_.data(), pad_, 1}, chunk.keys(),
               [&](int64_t row, int64_t i, vfloat sums) {
                 const int64_t at = row * kChunk + i;
                 const vfloat rest = load(v + at) - sums * load(f.decay + i);
                 store(r + at, rest), store(betas_r + at, rest * load(f.beta + i));
               });
      multiply(kDeltaColumns, kChunk, kChunk, {betas_r, kChunk, 1}, {f.zt, kChunk},
               [&](int64_t row, int64_t i, vfloat sums) {
                 float* to = r + row * kChunk + i;
                 store(to, load(to) - sums);
               });
      update_state(c);
    }
  }

  // S = e^Gn S + K' e^(Gn-G) u
  void update_state(int64_t c) {
    alignas(64) float u[kPanelSize];
    scale_tokens(r_.data() + c * kPanelSize, factors_[c].beta, u);
    scale_tokens(u, factors_[c].rest, u);
    advance(state_.data(), pad_, factors_[c].last, kChunk, u, rows_[c].k());
  }

  void dot_last_states(const Panel& panel) {
    load_panel(in_, p_.grad_state, panel.head, panel.first, pad_, grad_.data());
    gate_[chunks_ * kChunk] += dot(grad_.data(), state_.data(), kDeltaColumns * pad_);
  }

  void backward_pass(const Panel& panel, const TokenRows<T>& rows) {
    alignas(64) float go[kPanelSize], du[kPanelSize], u[kPanelSize], dr[kPanelSize];
    for (int64_t c = chunks_ - 1; c >= 0; --c) {
      const ChunkFactors& f = factors_[c];
      ChunkRows<T>& chunk = rows_[c];
      const float *v = v_.data() + c * kPanelSize, *r = r_.data() + c * kPanelSize;
      load_transposed(p_.grad_o ? chunk.count : 0, panel.count, go,
                      [&](int i) { return static_cast<const T*>(p_.grad_o) + offset(rows, chunk, i) + panel.first; });
      multiply(kDeltaColumns, kChunk, pad_, {grad_.data(), pad_, 1}, chunk.keys(),
               [&](int64_t row, int64_t i, vfloat sums) { store(du + row * kChunk + i, sums * load(f.rest + i)); });
      multiply(kDeltaColumns, kChunk, kChunk, {go, kChunk, 1}, {f.p, kChunk}, [&](int64_t row, int64_t i, vfloat sums) {
        const int64_t at = row * kChunk + i;
        const vfloat total = load(du + at) + sums;
        store(du + at, total), store(u + at, total * load(f.beta + i));
      });
      multiply(kDeltaColumns, kChunk, kChunk, {u, kChunk, 1}, {f.z, kChunk}, [&](int64_t row, int64_t i, vfloat sums) {
        const int64_t at = row * kChunk + i;
        store(du + at, load(du + at) - sums);
      });  // dy from here on
      for (int i = 0; i < kChunk; i += kLanes) {
        vfloat beta = load(dbeta_.data() + c * kChunk + i), gate = load(gate_.data() + c * kChunk + i);
        for (int at = i; at < kPanelSize; at += kChunk) {
          const vfloat dy = load(du + at), dv = dy * load(f.beta + i);
          store(dr + at, dv);
          beta += dy * load(r + at), gate -= dv * load(v + at);
        }
        store(dbeta_.data() + c * kChunk + i, beta), store(gate_.data() + c * kChunk + i, gate);
      }
      store_transposed(chunk.count, panel.count, dr,
                       [&](int i) { return static_cast<T*>(p_.grad_v) + offset(rows, chunk, i) + panel.first; });
      scale_tokens(r, f.beta, u);
      add_product({go, 1, kChunk}, {u, kChunk}, dp_.data() + c * ChunkFactors::kSquare);
      add_product({dr, 1, kChunk}, {u, kChunk}, x_.data() + c * ChunkFactors::kSquare);
      scale_tokens(u, f.rest, u);
      add_rows(kDeltaColumns, {u, 1, kChunk}, {grad_.data(), pad_}, dk_, c);
      // -e^G dR and scale e^G dO per column, in the order of k and q.
      float* both = grads_.data() + 2 * c * kPanelSize;
      for (int row = 0; row < kDeltaColumns; ++row)
        for (int i = 0; i < kChunk; i += kLanes) {
          store(both + row * 2 * kChunk + i, load(dr + row * kChunk + i) * load(f.decay + i) * -1.f);
          store(both + (row * 2 + 1) * kChunk + i, load(go + row * kChunk + i) * load(f.decay + i) * scale_);
        }
      advance(grad_.data(), pad_, f.last, 2 * kChunk, both, chunk.k());
    }
    store_panel(in_, p_.grad_initial_state, panel.head, panel.first, pad_, grad_.data());
  }

  void forward_pass(const Panel& panel) {
    load_panel(in_, p_.initial_state, panel.head, panel.first, pad_, state_.data());
    for (int64_t c = 0; c < chunks_; ++c) {
      const float* both = grads_.data() + 2 * c * kPanelSize;
      add_rows(kDeltaColumns, {both, 1, 2 * kChunk}, {state_.data(), pad_}, dk_, c);
      add_queries(kDeltaColumns, {both + kChunk, 1, 2 * kChunk}, {state_.data(), pad_}, c);
      update_state(c);
    }
  }

  // Add the terms between the tokens of a chunk.
  void add_within_chunks() {
    alignas(64) float dp[ChunkFactors::kSquare], x[ChunkFactors::kSquare], sum[ChunkFactors::kSquare];
    for (int64_t c = 0; c < chunks_; ++c) {
      const float *gam = factors_[c].gam, *all_dp = dp_.data() + c * ChunkFactors::kSquare,
                  *all_x = x_.data() + c * ChunkFactors::kSquare;
      for (int at = 0; at < ChunkFactors::kSquare; ++at) {
        dp[at] = scale_ * gam[at] * all_dp[at];
        x[at] = at % (kChunk + 1) == 0 ? 0.f : -gam[at] * all_x[at];
      }
      for (int i = 0; i < kChunk; ++i)
        for (int j = 0; j < kChunk; ++j) sum[i * kChunk + j] = x[i * kChunk + j] + x[j * kChunk + i];
      add_queries(kChunk, {dp, kChunk, 1}, {rows_[c].k(), pad_}, c);
      add_rows(kChunk, {dp, 1, kChunk}, {rows_[c].q(), pad_}, dk_, c);
      add_rows(kChunk, {sum, kChunk, 1}, {rows_[c].k(), pad_}, dk_, c);
    }
  }

  // to [kChunk, kChunk] += left right, summed over columns.
  static void add_product(const Left& left, const Right& right, float* to) {
    multiply(kChunk, kChunk, kDeltaColumns, left, right,
             [&](int64_t i, int64_t j, vfloat sums) { store(to + i * kChunk + j, load(to + i * kChunk + j) + sums); });
  }
  // Rows of a chunk += left right.
  void add_rows(int64_t depth, const Left& left, const Right& right, Lines& to, int64_t chunk) {
    float* rows = to.data() + chunk * kChunk * pad_;
    multiply(kChunk, pad_, depth, left, right,
             [&](int64_t i, int64_t d, vfloat sums) { store(rows + i * pad_ + d, load(rows + i * pad_ + d) + sums); });
  }
  // The same for dq. Its products with q belong to the gates.
  void add_queries(int64_t depth, const Left& left, const Right& right, int64_t chunk) {
    float *rows = dq_.data() + chunk * kChunk * pad_, *q = rows_[chunk].q();
    vfloat shares[kChunk] = {};
    multiply(kChunk, pad_, depth, left, right, [&](int64_t i, int64_t d, vfloat sums) {
      store(rows + i * pad_ + d, load(rows + i * pad_ + d) + sums);
      shares[i] += sums * load(q + i * pad_ + d);
    });
    for (int i = 0; i < kChunk; ++i) gate_[chunk * kChunk + i] += sum(shares[i]);
  }

  // Offset of a token's columns in tensors like v.
  int64_t offset(const TokenRows<T>& rows, const ChunkRows<T>& chunk, int i) const {
    return rows.number(chunk.batch, chunk.first + i) * in_.value_dim;
  }

  // Sums gates from the last token to the first.
  void write_gates(const TokenRows<T>& rows) {
    float total = gate_[chunks_ * kChunk];
    for (int64_t t = tokens_.end - 1; t >= tokens_.begin; --t) {
      const int64_t number = rows.number(tokens_.batch, t), i = t - tokens_.begin;
      total = rows.forgets(tokens_.batch, t) ? 0.f : total + gate_[i];
      if (p_.grad_g) static_cast<float*>(p_.grad_g)[number] = total;
      if (p_.grad_beta) static_cast<float*>(p_.grad_beta)[number] = dbeta_[i];
    }
  }

  void write_rows(int64_t head) {
    const TokenRows<T> rows(in_, head * in_.group());
    for (int64_t c = 0; c < chunks_; ++c) {
      ChunkRows<T>& chunk = rows_[c];
      for (int i = 0; i < chunk.count; ++i) {
        const int64_t b = chunk.batch, t = chunk.first + i, row = (c * kChunk + i) * pad_;
        const int64_t to = ((b * in_.num_tokens + t) * in_.num_heads + head) * in_.key_dim;
        store_row_gradient(in_, rows.raw_query(b, t), chunk.q() + i * pad_, dq_.data() + row, scratch_.data(),
                           static_cast<T*>(p_.grad_q) + to);
        store_row_gradient(in_, rows.raw_key(b, t), chunk.k() + i * pad_, dk_.data() + row, scratch_.data(),
                           static_cast<T*>(p_.grad_k) + to);
      }
    }
  }

  const DeltaRuleBackwardParams& p_;
  const DeltaRuleInputs& in_;
  std::vector<ChunkRows<T>> rows_;
  int64_t pad_, chunks_ = 0;
  Sequence tokens_{};
  Lines state_, grad_, scratch_;
  Lines dq_, dk_, dp_, x_, v_, r_, grads_;  // of a sequence
  std::vector<ChunkFactors> factors_;
  std::vector<float> gate_, dbeta_;
  float scale_;
};

template <typename T>
void delta_chunks_backward(const DeltaRuleBackwardParams& p) {
  const int64_t tasks = p.in.num_sequences * p.in.num_heads;
  parallel_tasks(tasks, [&](auto next) {
    DeltaChunkGradient<T> gradient(p);
    for (int64_t task = next(); task < tasks; task = next()) gradient.run(task / p.in.num_heads, task % p.in.num_heads);
  });
}

}  // namespace flashinfer::cpu
