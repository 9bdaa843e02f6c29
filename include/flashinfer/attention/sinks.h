// Attention sinks: a logit per query head that joins the softmax of every row and has no value.
//
// l = sum_j 2^(S_j - m) + 2^(sink - m),   O = (1 / l) sum_j 2^(S_j - m) V_j,   lse = m + log2(l)
// A row has one sink however its keys are split. Kernels therefore add it to finished rows, never to a
// partial state. Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv
// 2309.17453. The form is that of gpt-oss.
#pragma once

#include <flashinfer/attention/math.h>
#include <flashinfer/common/rows.h>

#include <cstdint>

namespace flashinfer {

// Return params.maybe_sinks [num_qo_heads], in natural units as logits are; null without sinks.
template <typename Params>
FLASHINFER_HD auto sinks_of(const Params& params, int) -> decltype(static_cast<const float*>(params.maybe_sinks)) {
  return params.maybe_sinks;
}
template <typename Params>
FLASHINFER_HD const float* sinks_of(const Params&, long) {  // a user's variant has none
  return nullptr;
}

// Add a row's sink to its softmax, `l` = sum of 2^(S - m). Return the factor that rescales O, because m may
// have been raised. The caller still divides O by l.
template <typename Variant, typename Params>
FLASHINFER_HD float add_sink([[maybe_unused]] const Params& params, [[maybe_unused]] int32_t qo_head,
                             [[maybe_unused]] float& m, [[maybe_unused]] float& l) {
  if constexpr (Variant::use_softmax) {
    const float* sinks = sinks_of(params, 0);
    if (sinks == nullptr) return 1.0f;
    const float sink = sinks[qo_head] * math::log2e;
    const float old = l == 0 ? -math::inf : m;
    const float top = sink > old ? sink : old;
    if (top == -math::inf) return 1.0f;  // no key, and a sink without weight
    const float rescale = math::ptx_exp2(old - top);
    l = l * rescale + math::ptx_exp2(sink - top), m = top;
    return rescale;
  }
  return 1.0f;
}

}  // namespace flashinfer
