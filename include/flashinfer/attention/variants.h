// The built-in variants.
#pragma once

#include <flashinfer/attention/config.h>
#include <flashinfer/attention/variant.h>

namespace flashinfer {

// Softmax of scaled products, with scale params.sm_scale. Kernels apply mask mode and window without help of
// a variant. use_custom_mask and use_sliding_window exist because variants of other libraries name them.
// sm_scale and the cap may be in params.maybe_numbers instead, see Number.
//   use_logits_soft_cap: S = cap * tanh(S / cap), params.logits_soft_cap > 0
//   use_alibi:           S += slope * (key position - query position),
//                        params.maybe_alibi_slopes [num_qo_heads]
template <bool use_custom_mask, bool use_sliding_window, bool use_logits_soft_cap, bool use_alibi>
struct DefaultAttention : AttentionVariantBase {
  uint32_t qo_len, kv_len;
  float sm_scale, sm_scale_log2, rcp_soft_cap;  // rcp_soft_cap includes sm_scale if no ALiBi term comes between them

  template <typename Params>
  FLASHINFER_HD DefaultAttention(const Params& params, uint32_t batch_idx, uint8_t*)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)), rcp_soft_cap(0) {
    const double* numbers = numbers_of(params, 0);
    sm_scale = numbers ? static_cast<float>(numbers[kSmScale]) : static_cast<float>(params.sm_scale);
    sm_scale_log2 = use_alibi ? math::log2e : sm_scale * math::log2e;
    if constexpr (use_logits_soft_cap) {
      // LogitsTransform returns the hyperbolic tangent. The cap is a factor of the scale.
      const float soft_cap =
          numbers ? static_cast<float>(numbers[kLogitsSoftCap]) : static_cast<float>(params.logits_soft_cap);
      rcp_soft_cap = use_alibi ? 1.0f / soft_cap : sm_scale / soft_cap;
      sm_scale_log2 = soft_cap * math::log2e;
    }
  }

  static constexpr bool transforms_logits = use_logits_soft_cap || use_alibi;

  template <typename Params, typename T>
  FLASHINFER_HD T LogitsTransform([[maybe_unused]] const Params& params, T logits, uint32_t, uint32_t qo_idx,
                                  uint32_t kv_idx, uint32_t qo_head_idx, uint32_t) const {
    if constexpr (use_alibi) {
      logits = logits * sm_scale;
      const float distance =
          static_cast<float>(static_cast<int32_t>(kv_idx + qo_len) - static_cast<int32_t>(kv_len + qo_idx));
      logits = logits + params.maybe_alibi_slopes[qo_head_idx] * distance;
    }
    if constexpr (use_logits_soft_cap) logits = math::tanh(logits * rcp_soft_cap);
    return logits;
  }
};

// The variant of a module's configuration, a sum of kSoftCap and others. The kernel itself applies kRope.
template <int32_t kWhat>
using BuiltinVariant = DefaultAttention<false, false, (kWhat & kSoftCap) != 0, (kWhat & kAlibi) != 0>;

// sigmoid(q . k * logits_scale + sigmoid_bias) as the weight of a key, without softmax. Source: Ramapuram et
// al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, arXiv 2409.04431.
struct FlashSigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  float scale_log2, bias_log2;

  template <typename Params>
  FLASHINFER_HD FlashSigmoid(const Params& params, uint32_t, uint8_t*)
      : scale_log2(static_cast<float>(params.logits_scale * math::log2e)),
        bias_log2(static_cast<float>(params.sigmoid_bias * math::log2e)) {}

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.0f + math::ptx_exp2(-(static_cast<float>(logits) * scale_log2 + bias_log2)));
  })

  // One reciprocal 1 / (a b) serves both: these functions take most of the time on a GPU. The product is
  // finite because weights are limited to 2^-63 from below.
  FLASHINFER_HD void transform_pair(float& a, float& b) const {
    const float first = 1.0f + math::ptx_exp2(math::min_or_nan(-(a * scale_log2 + bias_log2), 63.0f));
    const float second = 1.0f + math::ptx_exp2(math::min_or_nan(-(b * scale_log2 + bias_log2), 63.0f));
    const float both = math::ptx_rcp(first * second);
    a = second * both, b = first * both;
  }
};

}  // namespace flashinfer
