// The delta rule in double, token by token as its formulas have it, and the inputs that its drivers draw.
#pragma once

#include <flashinfer/cpu/delta_rule/columns.h>

#include "harness.h"

namespace driver {

enum class Beta { kNone, kNumber, kColumns };

struct DeltaCase {
  int64_t heads, group, keys, values;
  std::vector<int32_t> lengths;  // of sequences
  bool packed;                   // one behind the other in one batch, else each a batch of its own and of equal length
  bool g, gk;
  Beta beta;
  bool l2norm, v_first;

  int64_t sequences() const { return static_cast<int64_t>(lengths.size()); }
  int64_t value_heads() const { return heads * group; }
  int64_t state_size() const { return keys * values; }
  // Return the index in a state of row d and column c.
  int64_t in_state(int64_t d, int64_t c) const { return v_first ? c * keys + d : d * values + c; }
};

// Numbers of each token and head, as a kernel reads them and in double; rows of tokens may have a gap behind
// them.
template <typename T>
struct PerToken {
  int64_t heads = 0, size = 0, row = 0;
  std::vector<T> numbers;
  std::vector<double> exact;

  PerToken() = default;
  PerToken(int64_t tokens, int64_t heads, int64_t size, int64_t gap, double scale)
      : heads(heads), size(size), row(heads * size + gap), numbers(drawn<T>(tokens * row, scale)) {
    read();
  }
  template <typename Change>
  void change(const Change& to) {
    for (T& one : numbers) set(one, to(value(one)));
    read();
  }
  const void* data() const { return numbers.empty() ? nullptr : numbers.data(); }
  int64_t at(int64_t token, int64_t head, int64_t i) const { return token * row + head * size + i; }
  double get(int64_t token, int64_t head, int64_t i, double without) const {
    return exact.empty() ? without : exact[at(token, head, size == 1 ? 0 : i)];
  }

 private:
  void read() {
    exact.clear();
    for (const T& one : numbers) exact.push_back(value(one));
  }
};

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <typename T>
struct DeltaData {
  using S = cpu::StateOf<T>;
  static constexpr double kScale = 0.3;

  DeltaCase shape;
  std::vector<int32_t> starts = {0};
  PerToken<T> q, k, v;
  PerToken<S> g, gk, beta;

  explicit DeltaData(const DeltaCase& drawn_of) : shape(drawn_of) {
    for (const int32_t length : shape.lengths) starts.push_back(starts.back() + length);
    const int64_t tokens = starts.back(), heads = shape.value_heads();
    // Keys of a length of about one: states neither vanish nor grow.
    const double scale = shape.l2norm ? 1 : 1 / std::sqrt(static_cast<double>(shape.keys));
    q = {tokens, shape.heads, shape.keys, 3, 1}, k = {tokens, shape.heads, shape.keys, 5, scale};
    v = {tokens, heads, shape.values, 1, 1};
    if (shape.g) g = {tokens, heads, 1, 0, 0.5};
    if (shape.gk) gk = {tokens, heads, shape.keys, 0, 0.5};
    if (shape.beta != Beta::kNone) beta = {tokens, heads, shape.beta == Beta::kColumns ? shape.values : 1, 0, 1};
    g.change([](double x) { return -std::fabs(x); }), gk.change([](double x) { return -std::fabs(x); });
    beta.change(sigmoid);
  }

  DeltaRuleInputs inputs() const {
    DeltaRuleInputs in{};
    in.q = q.data(), in.k = k.data(), in.v = v.data(), in.g = g.data(), in.gk = gk.data(), in.beta = beta.data();
    in.beta_is_vector = shape.beta == Beta::kColumns;
    in.num_sequences = shape.sequences();
    in.batch_size = shape.packed ? 1 : in.num_sequences;
    in.num_tokens = shape.packed ? starts.back() : shape.lengths[0];
    const auto strides = [&](const PerToken<T>& x) { return TokenStrides{in.num_tokens * x.row, x.row, x.size}; };
    in.q_strides = strides(q), in.k_strides = strides(k), in.v_strides = strides(v);
    in.num_heads = shape.heads, in.num_value_heads = shape.value_heads();
    in.key_dim = shape.keys, in.value_dim = shape.values;
    if (shape.packed) in.cu_seqlens = {starts.data(), false};
    in.scale = {kScale, nullptr}, in.l2norm = shape.l2norm, in.v_first = shape.v_first;
    in.dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;  // others are the dispatch's alone
    return in;
  }

  // Take a value head's state, rows of columns, through sequence n, with each(token, its output) behind every
  // token.
  template <typename Each>
  void recur(int64_t n, int64_t head, std::vector<double>& state, const Each& each) const {
    std::vector<double> key, query, out(shape.values);
    for (int64_t t = starts[n]; t < starts[n + 1]; ++t) {
      normed(q, t, head / shape.group, query), normed(k, t, head / shape.group, key);
      for (int64_t d = 0; d < shape.keys; ++d) {
        const double decay = std::exp(g.get(t, head, 0, 0) + gk.get(t, head, d, 0));
        for (int64_t c = 0; c < shape.values; ++c) state[d * shape.values + c] *= decay;
      }
      for (int64_t c = 0; c < shape.values; ++c) {
        double prediction = 0, sum = 0;
        for (int64_t d = 0; d < shape.keys; ++d) prediction += state[d * shape.values + c] * key[d];
        const double u = beta.get(t, head, c, 1) * (v.get(t, head, c, 0) - prediction);
        for (int64_t d = 0; d < shape.keys; ++d) {
          double& one = state[d * shape.values + c];
          one += key[d] * u, sum += one * query[d];
        }
        out[c] = kScale * sum;
      }
      each(t, out);
    }
  }

 private:
  void normed(const PerToken<T>& from, int64_t token, int64_t head, std::vector<double>& to) const {
    double squares = 0;
    to.resize(from.size);
    for (int64_t d = 0; d < from.size; ++d) to[d] = from.get(token, head, d, 0), squares += to[d] * to[d];
    for (double& one : to) one *= shape.l2norm ? 1 / std::sqrt(squares + 1e-6) : 1;
  }
};

// The errors of sums in the state's type.
template <typename T>
constexpr double kStateError = sizeof(T) == 8 ? 1e-12 : 1e-5;

}  // namespace driver
