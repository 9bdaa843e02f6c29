// Gradients of the delta rule, each element against a central difference of the recurrence in double.
#include <flashinfer/cpu/delta_rule/backward.h>

#include "delta_oracle.h"

using namespace driver;

template <typename T>
class Case {
  using S = cpu::StateOf<T>;

 public:
  Case(const DeltaCase& shape, bool of_output, bool of_state) : shape_(shape), data_(shape) {
    const int64_t tokens = data_.starts.back(), heads = shape.value_heads();
    const int64_t states = shape.sequences() * heads * shape.state_size();
    initial_ = {shape.sequences(), heads, shape.state_size(), 0, 0.5};
    if (of_output) grad_o_ = {tokens, heads, shape.values, 0, 1};
    if (of_state) grad_state_ = {shape.sequences(), heads, shape.state_size(), 0, 1};
    q_ = unwritten<T>(tokens * shape.heads * shape.keys), k_ = q_, v_ = unwritten<T>(tokens * heads * shape.values);
    g_ = unwritten<S>(data_.g.numbers.size()), gk_ = unwritten<S>(data_.gk.numbers.size());
    beta_ = unwritten<S>(data_.beta.numbers.size()), state_ = unwritten<S>(states);
  }

  void run() {
    DeltaRuleBackwardParams p{};
    p.in = data_.inputs();
    p.grad_o = grad_o_.data(), p.grad_state = grad_state_.data(), p.initial_state = initial_.data();
    p.grad_q = q_.data(), p.grad_k = k_.data(), p.grad_v = v_.data(), p.grad_initial_state = state_.data();
    p.grad_g = g_.empty() ? nullptr : g_.data(), p.grad_gk = gk_.empty() ? nullptr : gk_.data();
    p.grad_beta = beta_.empty() ? nullptr : beta_.data();
    cpu::delta_rule_backward<T>(p);
    for (int64_t n = 0; n < shape_.sequences(); ++n) {
      compare("dq", n, data_.q, q_), compare("dk", n, data_.k, k_), compare("dv", n, data_.v, v_);
      compare("dg", n, data_.g, g_), compare("dgk", n, data_.gk, gk_), compare("dbeta", n, data_.beta, beta_);
      compare("dstate", n, n, n + 1, initial_, state_);
    }
  }

 private:
  // Return the loss of the value heads that share one head of q and k in one sequence.
  double loss(int64_t n, int64_t head) const {
    double total = 0;
    std::vector<double> state(shape_.state_size());
    for (int64_t h = head * shape_.group; h < (head + 1) * shape_.group; ++h) {
      const auto for_state = [&](const auto& body) {
        for (int64_t d = 0; d < shape_.keys; ++d)
          for (int64_t c = 0; c < shape_.values; ++c) body(state[d * shape_.values + c], shape_.in_state(d, c));
      };
      for_state([&](double& one, int64_t at) { one = initial_.get(n, h, at, 0); });
      data_.recur(n, h, state, [&](int64_t t, const std::vector<double>& out) {
        for (int64_t c = 0; c < shape_.values; ++c) total += out[c] * grad_o_.get(t, h, c, 0);
      });
      for_state([&](double one, int64_t at) { total += one * grad_state_.get(n, h, at, 0); });
    }
    return total;
  }

  template <typename N>
  void compare(const char* what, int64_t n, PerToken<N>& by, const std::vector<N>& got) {
    compare(what, n, data_.starts[n], data_.starts[n + 1], by, got);
  }

  // The gradients by the numbers of rows [first, last); `got` has no gaps.
  template <typename N>
  void compare(const char* what, int64_t n, int64_t first, int64_t last, PerToken<N>& by, const std::vector<N>& got) {
    constexpr double kStep = 1e-4, kError = sizeof(T) == 8 ? 1e-6 : 4e-5;
    if (got.empty()) return;
    for (int64_t token = first; token < last; ++token)
      for (int64_t head = 0; head < by.heads; ++head)
        for (int64_t i = 0; i < by.size; ++i) {
          const int64_t reads = by.heads == shape_.heads ? head : head / shape_.group;
          double& one = by.exact[by.at(token, head, i)];
          const double before = one;
          one = before + kStep;
          const double above = loss(n, reads);
          one = before - kStep;
          const double slope = (above - loss(n, reads)) / (2 * kStep);
          one = before;
          const int64_t at = (token * by.heads + head) * by.size + i;
          check_rounded(what, at, got[at], slope, kError, 1 + std::fabs(slope));
        }
  }

  DeltaCase shape_;
  DeltaData<T> data_;
  PerToken<S> initial_, grad_state_;  // by sequences
  PerToken<T> grad_o_;
  std::vector<T> q_, k_, v_;
  std::vector<S> g_, gk_, beta_, state_;
};

void run() {
  Case<double>({2, 2, 9, 7, {4, 4}, false, true, true, Beta::kColumns, true, false}, true, true).run();
  Case<double>({1, 1, 19, 35, {3, 0, 1}, true, true, false, Beta::kNumber, false, true}, true, false).run();
  Case<float>({1, 2, 18, 33, {3, 2}, true, true, true, Beta::kNumber, true, true}, true, true).run();
  Case<float>({2, 1, 5, 12, {5, 5}, false, false, true, Beta::kNone, false, false}, false, true).run();
  Case<half_t>({1, 2, 8, 16, {4, 1}, true, true, false, Beta::kColumns, true, false}, true, true).run();
  Case<bfloat16_t>({2, 2, 3, 5, {3, 3, 3}, false, false, false, Beta::kNumber, false, true}, true, true).run();
}
