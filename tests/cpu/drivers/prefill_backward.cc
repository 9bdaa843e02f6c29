// Gradients of attention, against those of attention in double.
#include <flashinfer/cpu/attention/backward.h>

#include "harness.h"

using namespace driver;

constexpr int kQoHeads = 4, kKvHeads = 2, kGroup = kQoHeads / kKvHeads;

template <typename T>
struct Heads {
  std::vector<T> numbers;
  int heads, dim;

  T& at(int64_t token, int head, int d) { return numbers[(token * heads + head) * dim + d]; }
  HeadRows rows() { return {numbers.data(), int64_t{heads} * dim, dim}; }
};

template <typename T>
class Case {
 public:
  Case(int qk, int vo, int32_t queries, int32_t keys, MaskMode mask, float cap)
      : queries_(queries), keys_(keys), mask_(mask), cap_(cap) {
    q_ = {drawn<T>(int64_t{queries} * kQoHeads * qk), kQoHeads, qk};
    k_ = {drawn<T>(int64_t{keys} * kKvHeads * qk), kKvHeads, qk};
    v_ = {drawn<T>(int64_t{keys} * kKvHeads * vo), kKvHeads, vo};
    grad_ = {drawn<T>(int64_t{queries} * kQoHeads * vo), kQoHeads, vo};
    out_ = {std::vector<T>(grad_.numbers.size()), kQoHeads, vo};
    dq_ = {unwritten<T>(q_.numbers.size()), kQoHeads, qk};
    dk_ = {unwritten<T>(k_.numbers.size()), kKvHeads, qk};
    dv_ = {unwritten<T>(v_.numbers.size()), kKvHeads, vo};
    lse_.resize(queries * kQoHeads), grad_lse_ = drawn<float>(queries * kQoHeads);
    slopes_ = drawn<float>(kQoHeads, 0.05);
    want_q_.resize(q_.numbers.size()), want_k_.resize(k_.numbers.size()), want_v_.resize(v_.numbers.size());
  }

  void run() {
    for (int32_t query = 0; query < queries_; ++query)
      for (int head = 0; head < kQoHeads; ++head) differentiate(query, head);
    PrefillBackwardParams p{};
    p.q = q_.rows(), p.k = k_.rows(), p.v = v_.rows(), p.out = out_.rows(), p.grad = grad_.rows();
    p.dq = dq_.rows(), p.dk = dk_.rows(), p.dv = dv_.rows();
    p.lse = lse_.data(), p.grad_lse = grad_lse_.data();
    p.batch_size = 1, p.tokens = queries_, p.kv_tokens = keys_;
    p.num_qo_heads = kQoHeads, p.num_kv_heads = kKvHeads, p.head_dim_qk = q_.dim, p.head_dim_vo = v_.dim;
    p.mask_mode = mask_, p.window_left = -1, p.logits_soft_cap = cap_, p.sm_scale = kScale;
    p.alibi_slopes = cap_ > 0 ? slopes_.data() : nullptr;
    p.splits = cpu::prefill_backward_splits(p);
    auto memory = unwritten<float>(p.splits * p.tokens * kQoHeads * q_.dim);
    p.memory = memory.data();
    cpu::prefill_backward<T>(p);
    compare("dq", dq_.numbers, want_q_), compare("dk", dk_.numbers, want_k_), compare("dv", dv_.numbers, want_v_);
  }

 private:
  static constexpr float kScale = 0.12f;

  // Add one row of the forward pass to the gradients.
  void differentiate(int32_t query, int head) {
    const int32_t position = keys_ - queries_ + query, seen = mask_ == MaskMode::kCausal ? position + 1 : keys_;
    const int kv_head = head / kGroup;
    std::vector<double> weight(keys_), slope(keys_, 1);
    double total = 0;
    for (int32_t key = 0; key < seen; ++key) {
      double logit = 0;
      for (int d = 0; d < q_.dim; ++d) logit += value(q_.at(query, head, d)) * value(k_.at(key, kv_head, d));
      logit *= kScale;
      if (cap_ > 0) {
        const double capped = std::tanh((logit + slopes_[head] * (key - position)) / cap_);
        logit = cap_ * capped, slope[key] = 1 - capped * capped;
      }
      total += weight[key] = std::exp(logit);
    }
    const int64_t at = int64_t{query} * kQoHeads + head;
    lse_[at] = static_cast<float>(total == 0 ? -INFINITY : std::log2(total));
    double delta = -grad_lse_[at] * M_LOG2E;
    for (int d = 0; d < v_.dim; ++d) {
      double sum = 0;
      for (int32_t key = 0; key < seen; ++key) sum += weight[key] / total * value(v_.at(key, kv_head, d));
      set(out_.at(query, head, d), sum);
      delta += value(out_.at(query, head, d)) * value(grad_.at(query, head, d));
    }
    for (int32_t key = 0; key < seen; ++key) {
      const double p = weight[key] / total;
      double by_weight = -delta;
      for (int d = 0; d < v_.dim; ++d) {
        const double g = value(grad_.at(query, head, d));
        by_weight += g * value(v_.at(key, kv_head, d));
        want_v_[(int64_t{key} * kKvHeads + kv_head) * v_.dim + d] += p * g;
      }
      const double ds = p * by_weight * slope[key] * kScale;
      for (int d = 0; d < q_.dim; ++d) {
        want_q_[at * q_.dim + d] += ds * value(k_.at(key, kv_head, d));
        want_k_[(int64_t{key} * kKvHeads + kv_head) * q_.dim + d] += ds * value(q_.at(query, head, d));
      }
    }
  }

  static void compare(const char* what, const std::vector<T>& got, const std::vector<double>& want) {
    for (size_t i = 0; i < got.size(); ++i) check_rounded(what, static_cast<int64_t>(i), got[i], want[i], 2e-5);
  }

  int32_t queries_, keys_;
  MaskMode mask_;
  float cap_;
  Heads<T> q_, k_, v_, grad_, out_, dq_, dk_, dv_;
  std::vector<float> lse_, grad_lse_, slopes_;
  std::vector<double> want_q_, want_k_, want_v_;
};

void run() {
  Case<half_t>(64, 64, 30, 150, MaskMode::kCausal, 0).run();
  Case<half_t>(72, 24, 17, 33, MaskMode::kNone, 3).run();
  Case<half_t>(40, 8, 140, 600, MaskMode::kCausal, 3).run();
}
