// Attention sinks: a logit of each query head that joins the softmax of every row and has no value. It takes weight
// from the keys: the sum of the weights, and with it the lse, has one term more.
//
// A row has one sink however its keys are split, so kernels add it where a whole row is finished, never to a part.
// Source: Xiao et al.: Efficient Streaming Language Models with Attention Sinks, 2024; the form is that of gpt-oss.
#pragma once

#include <flashinfer/attention/math.h>
#include <flashinfer/common/rows.h>

#include <cstdint>

namespace flashinfer {

// params.maybe_sinks [num_qo_heads], in natural units as logits are; null where there are none.
template <typename Params>
FLASHINFER_HD auto sinks_of(const Params& params, int) -> decltype(static_cast<const float*>(params.maybe_sinks)) {
  return params.maybe_sinks;
}
template <typename Params>
FLASHINFER_HD const float* sinks_of(const Params&, long) {  // a variant of a user's, which has none
  return nullptr;
}

// Adds a row's sink to its softmax: `l` is the sum of 2^(logit - m). Returns what the row's sums of values are to be
// multiplied by because m may have been raised; they are to be divided by l, as ever.
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
