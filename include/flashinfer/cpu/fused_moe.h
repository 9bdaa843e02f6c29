// Mixture of experts on the CPU: routing, rows of experts, activation and the sum over a token's experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/math.h>
#include <flashinfer/cpu/simd/quantize.h>

namespace flashinfer::cpu {

// ---- routing ----------------------------------------------------------------------------------------------

// Experts of one token. `choice` holds the choosing scores, -inf for experts that cannot be chosen.
class TokenRoute {
 public:
  explicit TokenRoute(const RouteParams& p)
      : p_(p), logits_(p.experts), scores_(p.experts), choice_(p.experts), order_(p.experts) {}

  template <typename T>
  void run(int64_t token) {
    const T* row = static_cast<const T*>(p_.logits) + token * p_.logits_stride;
    for (int e = 0; e < p_.experts; ++e) {
      const float logit = to_float(row[e]);
      logits_[e] = std::isnan(logit) ? -kInfinity : logit;
    }
    score();
    std::iota(order_.begin(), order_.end(), 0);
    std::partial_sort(order_.begin(), order_.begin() + std::min(p_.top_k, p_.experts), order_.end(),
                      [&](int a, int b) { return choice_[a] != choice_[b] ? choice_[a] > choice_[b] : a < b; });
    write<T>(token);
  }

 private:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  void score() {
    const float largest = *std::max_element(logits_.begin(), logits_.end());
    float total = 0;
    for (int e = 0; e < p_.experts; ++e) {
      const float logit = logits_[e];
      scores_[e] = logit;
      if (p_.is_sigmoid() || p_.method == RoutingMethod::kLlama4) scores_[e] = 1.0f / (1.0f + std::exp(-logit));
      if (p_.is_softmax()) total += scores_[e] = logit == largest ? 1.0f : std::exp(logit - largest);
    }
    for (int e = 0; e < p_.experts; ++e) {
      if (p_.is_softmax()) scores_[e] /= total;
      choice_[e] = logits_[e];
      if (p_.scores_choose() && logits_[e] != -kInfinity) choice_[e] = scores_[e] + (p_.bias ? p_.bias[e] : 0.0f);
      if (std::isnan(choice_[e])) choice_[e] = -kInfinity;
    }
    if (p_.num_groups > 1) keep_groups();
  }

  void keep_groups() {
    const int size = p_.experts / p_.num_groups;
    std::vector<float> of_group(p_.num_groups);
    for (int g = 0; g < p_.num_groups; ++g) {
      float first = -kInfinity, second = -kInfinity;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        second = std::max(second, std::min(first, choice_[e]));
        first = std::max(first, choice_[e]);
      }
      of_group[g] = p_.sums_best_two() && size > 1 ? first + second : first;
    }
    std::vector<int> order(p_.num_groups);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return of_group[a] != of_group[b] ? of_group[a] > of_group[b] : a < b; });
    for (int i = p_.top_groups; i < p_.num_groups; ++i)
      std::fill_n(choice_.begin() + order[i] * size, size, -kInfinity);
  }

  template <typename T>
  void write(int64_t token) {
    float weights[kMaxTopK], total = 0;
    for (int j = 0; j < p_.top_k; ++j) {
      const bool chosen = j < p_.experts && choice_[order_[j]] != -kInfinity;
      const int64_t id = chosen ? order_[j] : -1, at = token * p_.ids_stride + j;
      if (p_.wide_ids) {
        static_cast<int64_t*>(p_.ids)[at] = id;
      } else {
        static_cast<int32_t*>(p_.ids)[at] = static_cast<int32_t>(id);
      }
      weights[j] = chosen ? scores_[id] : 0.0f;
      total += weights[j];
    }
    const float factor = p_.renormalizes() ? p_.factor / (total + 1e-20f) : p_.factor;
    const int64_t to = token * p_.weights_stride;
    for (int j = 0; j < p_.top_k; ++j) {
      if (p_.narrow) {
        static_cast<T*>(p_.weights)[to + j] = from_float<T>(weights[j] * factor);
      } else {
        static_cast<float*>(p_.weights)[to + j] = weights[j] * factor;
      }
    }
  }

  const RouteParams& p_;
  std::vector<float> logits_, scores_, choice_;
  std::vector<int> order_;
};

template <typename T>
void route(const RouteParams& p) {
  parallel_rows(p.tokens, 16 * int64_t{p.experts}, [&](int64_t first, int64_t last) {
    TokenRoute route(p);
    for (int64_t token = first; token < last; ++token) route.run<T>(token);
  });
}

// ---- rows of experts --------------------------------------------------------------------------------------

inline void sort_slots(const SortParams& p) {
  std::vector<int32_t> next(p.experts + 2);
  for (int64_t slot = 0; slot < p.slots; ++slot) ++next[p.expert(slot) + 1];
  for (int e = 0; e <= p.experts; ++e) next[e + 1] += next[e];
  std::copy_n(next.begin(), p.experts + 1, p.indptr);
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    const int expert = p.expert(slot);
    const int32_t row = next[expert]++;
    p.tokens[row] = static_cast<int32_t>(slot / p.top_k);
    p.rows[slot] = expert < p.experts ? row : -1;
  }
}

// ---- between the products ---------------------------------------------------------------------------------

struct LibraryMath {
  static float exp(float x) { return std::exp(x); }
  static float tanh(float x) { return std::tanh(x); }
  static float erf(float x) { return std::erf(x); }
};

template <typename T>
class ActivatedRow {
 public:
  explicit ActivatedRow(const ActivateParams& p) : p_(p), values_(p.size), wide_(p.width()) {}

  void run(int64_t row) {
    const T* in = static_cast<const T*>(p_.input) + row * p_.input_stride;
    for_lanes(p_.width(), [&](int64_t i, int count) { store(&wide_[i], load(in + i, count), count); });
    const int expert = p_.indptr ? p_.expert(row) : 0;
    if (p_.bias)
      for (int64_t i = 0; i < p_.width(); ++i) wide_[i] += p_.bias[expert * p_.width() + i];
    const GateParameters numbers(p_, expert);
    const bool plain = p_.act == Activation::kSwiglu && !p_.alpha && !p_.beta && !p_.limit;
    const float *up = wide_.data() + p_.linear_at(), *gate = wide_.data() + p_.gate_at();
    for_lanes(plain ? p_.size : 0, [&](int64_t i, int count) {
      const vfloat g = load(gate + i, count);
      // e^-87 is negligible next to 1, and g / e^88 is below any 16-bit number; NaN stays NaN.
      const vfloat tail = exp(max(splat(-87.0f), -max(splat(-88.0f), g)));
      store(&values_[i], g / (1.0f + tail) * load(up + i, count), count);
    });
    for (int64_t i = 0; !plain && i < p_.size; ++i) values_[i] = activate<LibraryMath>(p_.act, gate[i], up[i], numbers);
    write(row);
  }

 private:
  void write(int64_t row) {
    if (!p_.quant_scale && !p_.block_scales) {
      T* out = static_cast<T*>(p_.output) + row * p_.size;
      for_lanes(p_.size, [&](int64_t i, int count) { cpu::store(out + i, load(&values_[i], count), count); });
      return;
    }
    fp8_e4m3_t* out = static_cast<fp8_e4m3_t*>(p_.output) + row * p_.size;
    const int64_t blocks = (p_.size + kQuantBlock - 1) / kQuantBlock;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * kQuantBlock, end = std::min(p_.size, begin + kQuantBlock);
      float factor = p_.quant_scale ? *p_.quant_scale : 0;
      if (p_.block_scales) {
        float largest = 0;
        for (int64_t i = begin; i < end; ++i)
          if (std::fabs(values_[i]) > largest) largest = std::fabs(values_[i]);  // false for NaN
        const float scale = block_scale(largest);
        p_.block_scales[row * blocks + block] = scale;
        factor = 1.0f / scale;
      }
      for_lanes(end - begin, [&](int64_t i, int count) {
        store_quantized(out + begin + i, load(&values_[begin + i], count) * factor, count);
      });
    }
  }

  const ActivateParams& p_;
  std::vector<float> values_, wide_;
};

template <typename T>
void activate_rows(const ActivateParams& p) {
  parallel_rows(p.count(), p.width() * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    ActivatedRow<T> activated(p);
    for (int64_t row = first; row < last; ++row) activated.run(row);
  });
}

template <typename T, typename Out>
void finalize(const FinalizeParams& p) {
  parallel_rows(p.tokens, p.top_k * p.size * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    std::vector<float> total(p.size + kLanes);
    for (int64_t token = first; token < last; ++token) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
        const int32_t row = p.rows[slot];
        if (row < 0) continue;
        const T* in = static_cast<const T*>(p.input) + row * p.input_stride;
        const float* bias = p.bias ? p.bias + p.expert(row) * p.size : nullptr;
        const float weight = p.weights ? p.weights[slot] : 1.0f;
        for_lanes(p.size, [&](int64_t i, int count) {
          vfloat x = load(in + i, count);
          if (bias) x += load(bias + i, count);
          store(&total[i], load(&total[i]) + x * weight);
        });
      }
      Out* out = static_cast<Out*>(p.out) + token * p.out_stride;
      for_lanes(p.size, [&](int64_t i, int count) { store(out + i, load(&total[i]), count); });
    }
  });
}

template <typename T>
void finalize(const FinalizeParams& p) {
  if (p.out_dtype == DType::kFloat32) return finalize<T, float>(p);
  if (p.out_dtype == DType::kFloat16) return finalize<T, half_t>(p);
  finalize<T, bfloat16_t>(p);
}

}  // namespace flashinfer::cpu
