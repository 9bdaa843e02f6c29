// Routing, rows of experts, activation to 16 and 8 bits, and the sum over a token's experts.
#include <flashinfer/cpu/fused_moe.h>

#include "harness.h"

using namespace driver;

// An expert counts as equally good if its choice is within rounding of the chosen ones.
template <typename T>
void routes(RoutingMethod method, int experts, int top_k, int groups, int kept, bool has_bias) {
  const int64_t tokens = 19;
  const auto logits = drawn<T>(tokens * experts);
  const auto bias = drawn<float>(experts, 0.2);
  auto weights = unwritten<float>(tokens * top_k);
  std::vector<int64_t> ids(tokens * top_k, -7);
  RouteParams p{};
  p.logits = logits.data(), p.logits_stride = experts, p.dtype = kType<T>;
  if (has_bias) p.bias = bias.data();
  p.weights = weights.data(), p.ids = ids.data(), p.wide_ids = true, p.weights_stride = p.ids_stride = top_k;
  p.tokens = tokens, p.experts = experts, p.top_k = top_k, p.num_groups = groups, p.top_groups = kept;
  p.method = method, p.factor = 2;
  cpu::route<T>(p);
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> score(experts), choice(experts), of_group(groups, -INFINITY);
    double total = 0, most = -INFINITY;
    for (int e = 0; e < experts; ++e) most = std::max(most, value(logits[t * experts + e]));
    for (int e = 0; e < experts; ++e) {
      const double x = value(logits[t * experts + e]);
      score[e] = p.is_softmax() ? std::exp(x - most) : p.is_sigmoid() ? 1 / (1 + std::exp(-x)) : x;
      total += score[e];
    }
    for (int e = 0; e < experts; ++e) {
      if (p.is_softmax()) score[e] /= total;
      choice[e] = score[e] + (has_bias ? bias[e] : 0);
    }
    const int size = experts / groups;
    for (int g = 0; g < groups; ++g) {
      std::vector<double> some(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(some.rbegin(), some.rend());
      of_group[g] = p.sums_best_two() && size > 1 ? some[0] + some[1] : some[0];
    }
    auto best = of_group;
    std::sort(best.rbegin(), best.rend());
    std::vector<double> open;
    for (int e = 0; e < experts; ++e)
      if (of_group[e / size] >= best[kept - 1]) open.push_back(choice[e]);
    std::sort(open.rbegin(), open.rend());
    double chosen = 0;
    for (int j = 0; j < top_k; ++j) chosen += score[ids[t * top_k + j]];
    for (int j = 0; j < top_k; ++j) {
      const int64_t at = t * top_k + j, id = ids[at];
      check("choice", at, choice[id], open[j], 2e-6);
      check("weight", at, weights[at], 2 * score[id] / (p.renormalizes() ? chosen : 1),
            4e-6 * (1 + std::fabs(score[id])));
    }
  }
}

void sorts(int64_t tokens, int top_k, int experts, int64_t first) {
  std::vector<int32_t> ids(tokens * top_k), bounds(experts + 1, -7), token_of(ids.size(), -7), rows(ids.size(), -7);
  for (int32_t& id : ids) id = drawn_int(-1, 2 * experts);
  SortParams p{
      ids.data(),  false,  static_cast<int64_t>(ids.size()), top_k, first, experts, bounds.data(), token_of.data(),
      rows.data(), nullptr};
  cpu::sort_slots(p);
  int64_t row = 0;
  for (int e = 0; e <= experts; ++e) {
    check("indptr", e, bounds[e], static_cast<double>(row), 0);
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      if (p.expert(static_cast<int64_t>(slot)) != e) continue;
      check("token", row, token_of[row], static_cast<double>(slot / top_k), 0);
      check("row", static_cast<int64_t>(slot), rows[slot], e < experts ? static_cast<double>(row) : -1, 0);
      ++row;
    }
  }
}

double exact(Activation act, double gate, double up) {
  const double half = std::sqrt(0.5), tanh = std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate));
  switch (act) {
    case Activation::kSwiglu: return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeglu: return 0.5 * gate * (1 + std::erf(gate * half)) * up;
    case Activation::kGegluTanh: return 0.5 * gate * (1 + tanh) * up;
    case Activation::kRelu2: return gate > 0 ? gate * gate : 0;
    default: return gate;
  }
}

template <typename T>
void layers(Activation act, int64_t size, int bits) {
  const int64_t rows = 12, count = 10, width = is_gated(act) ? 2 * size : size, blocks = (size + 127) / 128;
  const auto in = drawn<T>(rows * width);
  const std::vector<int32_t> bounds{0, 3, 3, count};
  const auto bias = drawn<float>(3 * width);
  auto out = unwritten<T>(rows * size);
  auto eight = unwritten<fp8_e4m3_t>(rows * size);
  auto scales = unwritten<float>(rows * blocks);
  const float scale = 9;
  ActivateParams p{};
  p.input = in.data(), p.input_stride = width, p.dtype = kType<T>, p.rows = rows, p.size = size, p.act = act;
  p.indptr = bounds.data(), p.experts = 3, p.bias = bias.data();
  p.output = bits == 8 ? static_cast<void*>(eight.data()) : out.data();
  if (bits == 8) (size > 128 ? p.block_scales = scales.data() : nullptr), p.quant_scale = size > 128 ? nullptr : &scale;
  cpu::activate_rows<T>(p);
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < size; ++i) {
      const float* b = &bias[(row < 3 ? 0 : 2) * width];
      const double up = value(in[row * width + i]) + b[i];
      const int64_t other = is_gated(act) ? size + i : i;
      const double want = exact(act, value(in[row * width + other]) + b[other], up);
      const int64_t at = row * size + i;
      if (bits != 8) {
        check_rounded("activated", at, out[at], want, 1e-5, 1 + std::fabs(want));
      } else {
        const double by = p.block_scales ? scales[row * blocks + i / 128] : 1 / scale;
        const double most = std::max(-448 * by, std::min(448 * by, want));
        check("quantised", at, value(eight[at]) * by, most, 0.0635 * std::fabs(most) + by / 500 + 1e-5);
      }
    }

  const int64_t tokens = 4;
  const int top_k = 3;
  std::vector<int32_t> of_slot(tokens * top_k);
  for (size_t slot = 0; slot < of_slot.size(); ++slot)
    of_slot[slot] = slot == 5 ? -1 : static_cast<int32_t>(slot * 7 % 10);
  const auto weights = drawn<float>(tokens * top_k), shift = drawn<float>(3 * width);
  auto sum = unwritten<float>(tokens * width);
  FinalizeParams f{};
  f.input = in.data(), f.input_stride = width, f.dtype = kType<T>, f.out = sum.data(), f.out_stride = width;
  f.out_dtype = DType::kFloat32, f.weights = weights.data(), f.rows = of_slot.data(), f.bias = shift.data();
  f.indptr = bounds.data(), f.experts = 3, f.tokens = tokens, f.size = width, f.top_k = top_k;
  cpu::finalize<T>(f);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < width; ++i) {
      double want = 0, terms = 0;
      for (int64_t slot = t * top_k; slot < (t + 1) * top_k; ++slot) {
        const int64_t row = of_slot[slot];
        if (row < 0) continue;
        const double term = weights[slot] * (value(in[row * width + i]) + shift[(row < 3 ? 0 : 2) * width + i]);
        want += term, terms += std::fabs(term);
      }
      check("sum", t * width + i, sum[t * width + i], want, 1e-6 * terms);
    }
}

void run() {
  routes<float>(RoutingMethod::kDefault, 33, 4, 1, 1, true);
  routes<half_t>(RoutingMethod::kRenormalize, 64, 8, 1, 1, false);
  routes<bfloat16_t>(RoutingMethod::kTopK, 9, 9, 1, 1, false);
  routes<float>(RoutingMethod::kDeepSeekV3, 64, 6, 8, 3, true);
  sorts(50, 3, 8, 0);
  sorts(7, 2, 5, 4);
  layers<float>(Activation::kSwiglu, 77, 16);
  layers<half_t>(Activation::kGeglu, 40, 16);
  layers<bfloat16_t>(Activation::kSwiglu, 200, 8);
  layers<float>(Activation::kRelu2, 100, 8);
  layers<float>(Activation::kGegluTanh, 33, 32);
}
