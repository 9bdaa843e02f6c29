// Mixture of experts without its GEMMs: routing methods, activations and parameters of the kernels.
//
// A token is routed to top_k experts. Each (token, expert) pair is a slot. Slots sorted by expert, then
// token, are rows: expert e has rows [indptr[e], indptr[e + 1]). Slots of experts on other devices come last.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/search.h>

namespace flashinfer {

// ---- routing ----------------------------------------------------------------------------------------------

// Values equal those of flashinfer.fused_moe.RoutingMethodType.
enum class RoutingMethod : int32_t {
  kDefault,           // softmax, then top k
  kRenormalize,       // top k, then softmax over them
  kDeepSeekV3,        // sigmoid, top k of sigmoid + bias in the best groups, renormalised
  kLlama4,            // top k, then sigmoid
  kRenormalizeNaive,  // softmax, top k, renormalised
  kTopK,              // top k
  kSigmoidRenorm,     // sigmoid, top k, renormalised
  kMiniMax2,          // sigmoid, top k of sigmoid + bias, renormalised
  kSigmoid            // sigmoid, then top k
};
constexpr int kRoutingMethods = 9;
constexpr int kMaxTopK = 32, kMaxExpertGroups = 32;

struct RouteParams {
  const void* logits;  // [tokens, experts], contiguous rows
  int64_t logits_stride;
  DType dtype;
  const float* bias;  // [experts], added to the scores that choose experts, or null
  void* weights;      // [tokens, top_k], float or of the type of logits
  bool narrow;        // weights have the type of logits
  void* ids;          // [tokens, top_k], descending by choosing score; -1: no expert left
  bool wide_ids;
  int64_t weights_stride, ids_stride;
  int64_t tokens;
  int experts, top_k, num_groups, top_groups;
  RoutingMethod method;
  float factor;  // multiplies the weights

  FLASHINFER_HD bool is_softmax() const {
    return method == RoutingMethod::kDefault || method == RoutingMethod::kRenormalize ||
           method == RoutingMethod::kRenormalizeNaive;
  }
  FLASHINFER_HD bool is_sigmoid() const {
    return method == RoutingMethod::kDeepSeekV3 || method == RoutingMethod::kSigmoidRenorm ||
           method == RoutingMethod::kMiniMax2 || method == RoutingMethod::kSigmoid;
  }
  FLASHINFER_HD bool renormalizes() const {
    return method == RoutingMethod::kRenormalize || method == RoutingMethod::kRenormalizeNaive ||
           (is_sigmoid() && method != RoutingMethod::kSigmoid);
  }
  // With a bias or groups, experts are chosen by score. Otherwise they are chosen by logit: the order is the
  // same, and ties are rarer.
  FLASHINFER_HD bool scores_choose() const { return bias || num_groups > 1; }
  // Return true if the score of a group is the sum of its two best experts, as in DeepSeek-V3. Otherwise it
  // is the score of its best expert.
  FLASHINFER_HD bool sums_best_two() const { return is_sigmoid(); }
};

// ---- rows of experts --------------------------------------------------------------------------------------

struct SortParams {
  const void* ids;  // [slots] of experts, contiguous
  bool wide_ids;
  int64_t slots;
  int top_k;
  int64_t first_expert;  // first expert of this device
  int experts;           // number of experts of this device
  int32_t* indptr;       // [experts + 1]
  int32_t* tokens;       // [slots], token of each row
  int32_t* rows;         // [slots], row of each slot; -1: the expert is on another device
  int32_t* workspace;    // sort_workspace() elements

  // Return the local index of a slot's expert, or `experts` if it is on another device.
  FLASHINFER_HD int expert(int64_t slot) const {
    const int64_t id = wide_ids ? static_cast<const int64_t*>(ids)[slot] : static_cast<const int32_t*>(ids)[slot];
    return id >= first_expert && id - first_expert < experts ? static_cast<int>(id - first_expert) : experts;
  }
};

// ---- between the two GEMMs --------------------------------------------------------------------------------

// Values equal those of flashinfer.tllm_enums.ActivationType.
enum class Activation : int32_t {
  kGelu = 0,
  kRelu = 1,
  kSilu = 2,
  kSwiglu = 3,
  kGeglu = 4,
  kSwigluBias = 5,
  kRelu2 = 6,
  kSwigluStep = 7,
  kGegluTanh = 8,
  kIdentity = 9,
  kSitu = 10
};
constexpr int kActivations = 11;

FLASHINFER_HD bool is_gated(Activation act) {
  return act == Activation::kSwiglu || act == Activation::kGeglu || act == Activation::kSwigluBias ||
         act == Activation::kSwigluStep || act == Activation::kGegluTanh || act == Activation::kSitu;
}

constexpr int kQuantBlock = 128;  // elements of a row that share a scale

// Return the scale of a block whose largest magnitude is `max_abs`. Its reciprocal is finite even for tiny
// blocks.
FLASHINFER_HD float block_scale(float max_abs) {
  constexpr float kMinDivisor = 1.17549435e-38f;  // 2^-126
  return max_abs == 0 ? 1.0f : max_abs / kMaxE4M3 < kMinDivisor ? kMinDivisor : max_abs / kMaxE4M3;
}

// Return the expert of a row: the last expert whose rows begin at or before it.
FLASHINFER_HD int expert_of_row(const int32_t* indptr, int experts, int64_t row) {
  return last_at_or_before(0, experts, row, [&](int e) { return indptr[e]; });
}

struct ActivateParams {
  const void* input;  // [rows, size], or [rows, 2 size] with a gate
  int64_t input_stride;
  DType dtype;               // of input, and of an unquantised output
  void* output;              // [rows, size], contiguous
  const float* quant_scale;  // scale of an e4m3 output, or null
  float* block_scales;       // [rows, ceil(size / 128)]: block scales of an e4m3 output, or null
  int64_t rows, size;
  const int32_t* indptr;  // [experts + 1], ends with the number of rows; null: no experts
  int experts;
  const float* bias;                  // [experts, size or 2 size], or null
  const float *alpha, *beta, *limit;  // [experts], gate parameters, or null
  Activation act;
  bool gate_first;  // input has the gate first, then the linear half

  FLASHINFER_HD int64_t count() const {
    const int64_t existing = indptr ? indptr[experts] : rows;
    return existing < rows ? existing : rows;
  }
  // Offsets of the gate and of the linear half in a row.
  FLASHINFER_HD int64_t gate_at() const { return is_gated(act) && !gate_first ? size : 0; }
  FLASHINFER_HD int64_t linear_at() const { return is_gated(act) && gate_first ? size : 0; }
  FLASHINFER_HD int64_t width() const { return is_gated(act) ? 2 * size : size; }
  FLASHINFER_HD int expert(int64_t row) const { return expert_of_row(indptr, experts, row); }
};

// Gate parameters of an expert. Situ bounds its gate by alpha and its linear half by beta.
struct GateParameters {
  float alpha, beta, limit;

  FLASHINFER_HD GateParameters(const ActivateParams& p, int expert)
      : alpha(p.alpha                      ? p.alpha[expert]
              : p.act == Activation::kSitu ? 4.0f
                                           : 1.0f),
        beta(p.beta                       ? p.beta[expert]
             : p.act == Activation::kSitu ? 25.0f
                                          : 0.0f),
        limit(p.limit                            ? p.limit[expert]
              : p.act == Activation::kSwigluStep ? 7.0f
                                                 : 3.4e38f) {}
};

// Clamp x to [-limit, limit]; NaN stays NaN.
FLASHINFER_HD float clamped(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// `Math` provides exp, tanh and erf of a float.
template <typename Math>
FLASHINFER_HD float activate(Activation act, float gate, float up, const GateParameters& numbers) {
  switch (act) {
    case Activation::kSwiglu:
    case Activation::kSwigluBias: {
      const float g = gate > numbers.limit ? numbers.limit : gate;
      return g / (1.0f + Math::exp(-numbers.alpha * g)) * (clamped(up, numbers.limit) + numbers.beta);
    }
    case Activation::kSwigluStep: {
      const float g = gate / (1.0f + Math::exp(-gate));
      return (g > numbers.limit ? numbers.limit : g) * clamped(up, numbers.limit);
    }
    case Activation::kSitu: {
      const float g = numbers.alpha * Math::tanh(gate / numbers.alpha) / (1.0f + Math::exp(-gate));
      return g * (numbers.beta * Math::tanh(up / numbers.beta));
    }
    case Activation::kSilu: return gate / (1.0f + Math::exp(-gate));
    case Activation::kGeglu:
    case Activation::kGelu: {
      const float act_gate = 0.5f * gate * (1.0f + Math::erf(gate * 0.70710678f));
      return act == Activation::kGeglu ? act_gate * up : act_gate;
    }
    case Activation::kGegluTanh:
      return 0.5f * gate * (1.0f + Math::tanh(0.79788456f * (gate + 0.044715f * gate * gate * gate))) * up;
    case Activation::kRelu: return gate < 0.0f ? 0.0f : gate;
    case Activation::kRelu2: return gate < 0.0f ? 0.0f : gate * gate;
    case Activation::kIdentity: break;
  }
  return gate;
}

// out[t] = sum over j of weight[t, j] (input[row of (t, j)] + bias of its expert), with j ascending, in
// float.
struct FinalizeParams {
  const void* input;  // [rows, size]
  int64_t input_stride;
  void* out;  // [tokens, size]
  int64_t out_stride;
  const float* weights;   // [tokens, top_k], contiguous; null: 1
  const int32_t* rows;    // [tokens, top_k], contiguous; -1 adds 0
  const float* bias;      // [experts, size], contiguous, or null
  const int32_t* indptr;  // [experts + 1], for the bias
  int experts;
  int64_t tokens, size;
  int top_k;
  DType dtype, out_dtype;

  FLASHINFER_HD int expert(int64_t row) const { return expert_of_row(indptr, experts, row); }
};

struct Launch;
int64_t sort_workspace(int64_t slots, int experts);
void route(const RouteParams& params, const Launch& launch);
void sort_slots(const SortParams& params, const Launch& launch);
void activate_rows(const ActivateParams& params, const Launch& launch);
void finalize(const FinalizeParams& params, const Launch& launch);

}  // namespace flashinfer
