// Variants: functors that change attention, with hooks that a kernel calls for every element. One definition
// serves every backend.
//
// A variant derives from AttentionVariantBase and has
//   - a constructor (const Params&, uint32_t batch_idx, uint8_t* smem_ptr), whose smem_ptr is always null,
//   - static constexpr bool use_softmax (true in the base), and a member sm_scale_log2 if it is true,
//   - window_left, if it has a window: a query sees that many keys to its left, and itself. The call's
//     window_left applies as well. A variant that copies a params.window_left of -1 gets a number above every
//     length: no window.
// check_variant.h reports what is wrong with a variant of another form. With softmax, the weight of a key is
// 2^(logit * sm_scale_log2) divided by the sum of all. Without softmax, it is the logit itself. Hooks are
// written with the REGISTER_ macros, and an absent hook costs nothing. The variant's own parameters are
// members of params: tensors as pointers to elements (null if a maybe_ tensor is None), scalars by value, in
// the module's types.
#pragma once

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>

#include <type_traits>

#if !defined(__CUDACC__)
// Variants qualify their functions for host and device. A C++ compiler knows only the host.
#define __host__
#define __device__
#define __forceinline__ inline
#endif

namespace flashinfer {

struct AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr bool transforms_query = false, transforms_key = false, transforms_logits = false;
  static constexpr bool masks_logits = false, transforms_output = false, normalises_output = false;

  template <typename Params, typename T>
  FLASHINFER_HD T QueryTransform(const Params&, T q) const {
    return q;
  }
  template <typename Params, typename T>
  FLASHINFER_HD T KeyTransform(const Params&, T k) const {
    return k;
  }
  template <typename Params, typename T>
  FLASHINFER_HD T LogitsTransform(const Params&, T logits, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) const {
    return logits;
  }
  template <typename Params>
  FLASHINFER_HD bool LogitsMask(const Params&, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) const {
    return true;
  }
  template <typename Params, typename T>
  FLASHINFER_HD T OutputTransform(const Params&, T output, uint32_t, uint32_t, uint32_t) const {
    return output;
  }
};

// Transform an element of the output of a row whose state is (m, l). `o` is normalised, unless the variant
// normalises it. Without softmax, the state is (0, 1).
template <typename Variant, typename Params>
FLASHINFER_HD float transform_output(const Params& params, const Variant& variant, float o, uint32_t batch_idx,
                                     uint32_t qo_idx, uint32_t qo_head_idx, float m, float l) {
  if constexpr (!Variant::normalises_output) {
    return static_cast<float>(variant.OutputTransform(params, o, batch_idx, qo_idx, qo_head_idx));
  } else if constexpr (Variant::use_softmax) {
    return static_cast<float>(
        variant.OutputTransform(params, o, batch_idx, qo_idx, qo_head_idx, l == 0 ? -math::inf : m, l, 1.0f));
  } else {
    return static_cast<float>(variant.OutputTransform(params, o, batch_idx, qo_idx, qo_head_idx, 0.0f, 1.0f, 1.0f));
  }
}

// Return the factor of a row's output with sum l, `rescale / l`. A variant that normalises gets `rescale`.
template <typename Variant>
FLASHINFER_HD float normaliser_of(float l, float rescale) {
  if constexpr (!Variant::use_softmax) return 1.0f;
  return Variant::normalises_output ? rescale : l == 0 ? 0.0f : rescale / l;
}

template <typename Variant, typename = void>
constexpr bool has_window = false;
template <typename Variant>
constexpr bool has_window<Variant, std::void_t<decltype(&Variant::window_left)>> = true;

// True if a variant has transform_pair(a, b): LogitsTransform of two keys at once, both visible to the query.
// An inherited one does not count, because the variant's LogitsTransform may differ.
template <typename Variant, typename = void>
constexpr bool transforms_pairs = false;
template <typename Variant>
constexpr bool transforms_pairs<Variant, std::void_t<decltype(&Variant::transform_pair)>> =
    std::is_same_v<decltype(&Variant::transform_pair), void (Variant::*)(float&, float&) const>;

// Apply a variant's own window to the masks of a work item. A function that returned the masks would cost
// registers in the kernels of other variants.
template <typename Variant>
FLASHINFER_HD void narrow([[maybe_unused]] Mask& mask, [[maybe_unused]] const Variant& variant) {
  if constexpr (has_window<Variant>) {
    const auto window = static_cast<uint32_t>(variant.window_left);
    if (window < static_cast<uint32_t>(mask.window_left)) mask.window_left = static_cast<int32_t>(window);
  }
}

}  // namespace flashinfer

// Transform an element of a query or a key, as float, before it is used.
#define REGISTER_QUERY_TRANSFORM(params, q, ...)                                     \
  static constexpr bool transforms_query = true;                                     \
  template <typename Params, typename T>                                             \
  FLASHINFER_HD T QueryTransform([[maybe_unused]] const Params& params, T q) const { \
    __VA_ARGS__                                                                      \
  }
#define REGISTER_KEY_TRANSFORM(params, k, ...)                                     \
  static constexpr bool transforms_key = true;                                     \
  template <typename Params, typename T>                                           \
  FLASHINFER_HD T KeyTransform([[maybe_unused]] const Params& params, T k) const { \
    __VA_ARGS__                                                                    \
  }
// Transform the product q . k of one query and one key, as float. Called once for each existing pair, so
// that a variant may use the numbers as indices.
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \
  static constexpr bool transforms_logits = true;                                                           \
  template <typename Params, typename T>                                                                    \
  FLASHINFER_HD T LogitsTransform([[maybe_unused]] const Params& params, T logits,                          \
                                  [[maybe_unused]] uint32_t batch_idx, [[maybe_unused]] uint32_t qo_idx,    \
                                  [[maybe_unused]] uint32_t kv_idx, [[maybe_unused]] uint32_t qo_head_idx,  \
                                  [[maybe_unused]] uint32_t kv_head_idx) const {                            \
    __VA_ARGS__                                                                                             \
  }
// Return true if the query may see the key. The mask mode, the window and the lengths apply as well.
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)                        \
  static constexpr bool masks_logits = true;                                                                          \
  template <typename Params>                                                                                          \
  FLASHINFER_HD bool LogitsMask([[maybe_unused]] const Params& params, [[maybe_unused]] uint32_t batch_idx,           \
                                [[maybe_unused]] uint32_t qo_idx, [[maybe_unused]] uint32_t kv_idx,                   \
                                [[maybe_unused]] uint32_t qo_head_idx, [[maybe_unused]] uint32_t kv_head_idx) const { \
    __VA_ARGS__                                                                                                       \
  }
// Transform an element of the output, as float. There are two forms:
//   (params, output, batch_idx, qo_idx, qo_head_idx, { ... })               output is normalised
//   (params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, { ... })  the body normalises it
// In the second form, output is the sum of 2^(S - m) V over all keys, times the scale of V, and d is the sum
// of 2^(S - m). S is the logit times sm_scale_log2. m is the reference of the sums, near the largest S, and
// -inf if the query sees no key. scale is 1. Without softmax, output is the sum of weight V, m is 0 and d is
// 1. Splits of the keys are merged before, so that the body runs once for each element. The forms are told
// apart by their commas: the body of the first form has at most two outside parentheses.
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, ...) \
  FLASHINFER_OUTPUT_FORM(__VA_ARGS__)(params, output, batch_idx, qo_idx, qo_head_idx, __VA_ARGS__)

#define FLASHINFER_NORMALISED_OUTPUT(params, output, batch_idx, qo_idx, qo_head_idx, ...)                \
  static constexpr bool transforms_output = true;                                                        \
  template <typename Params, typename T>                                                                 \
  FLASHINFER_HD T OutputTransform([[maybe_unused]] const Params& params, T output,                       \
                                  [[maybe_unused]] uint32_t batch_idx, [[maybe_unused]] uint32_t qo_idx, \
                                  [[maybe_unused]] uint32_t qo_head_idx) const {                         \
    __VA_ARGS__                                                                                          \
  }
#define FLASHINFER_SUMMED_OUTPUT(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, ...)       \
  static constexpr bool transforms_output = true, normalises_output = true;                              \
  template <typename Params, typename T>                                                                 \
  FLASHINFER_HD T OutputTransform([[maybe_unused]] const Params& params, T output,                       \
                                  [[maybe_unused]] uint32_t batch_idx, [[maybe_unused]] uint32_t qo_idx, \
                                  [[maybe_unused]] uint32_t qo_head_idx, [[maybe_unused]] float m,       \
                                  [[maybe_unused]] float d, [[maybe_unused]] float scale) const {        \
    __VA_ARGS__                                                                                          \
  }

// Select the second form if there are four arguments or more, at most 35.
#define FLASHINFER_OUTPUT_FORM(...)                                                                            \
  FLASHINFER_36TH(__VA_ARGS__, FLASHINFER_8(FLASHINFER_SUMMED_OUTPUT), FLASHINFER_8(FLASHINFER_SUMMED_OUTPUT), \
                  FLASHINFER_8(FLASHINFER_SUMMED_OUTPUT), FLASHINFER_8(FLASHINFER_SUMMED_OUTPUT),              \
                  FLASHINFER_NORMALISED_OUTPUT, FLASHINFER_NORMALISED_OUTPUT, FLASHINFER_NORMALISED_OUTPUT, )
#define FLASHINFER_8(x) x, x, x, x, x, x, x, x
#define FLASHINFER_36TH(...) FLASHINFER_36TH_OF(__VA_ARGS__)
#define FLASHINFER_36TH_OF(_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12, _13, _14, _15, _16, _17, _18, _19, _20, \
                           _21, _22, _23, _24, _25, _26, _27, _28, _29, _30, _31, _32, _33, _34, _35, x, ...)         \
  x
