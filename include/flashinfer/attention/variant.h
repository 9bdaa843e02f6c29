// How attention differs: variants, functors with hooks that a kernel calls for every element. One definition serves
// every backend.
//
// A variant derives from AttentionVariantBase and has
//   - a constructor (const Params&, uint32_t batch_idx, uint8_t* smem_ptr); smem_ptr is null and kept for the form,
//   - static constexpr bool use_softmax (the base's is true), and the member sm_scale_log2 where it is true,
//   - window_left, if it has a window: a query sees that many keys to its left and itself. A call's window_left holds
//     besides. A variant that copies params.window_left passes -1 on, as a number above every length: no window.
// Other members are its own business; check_variant.h says what is wrong with a variant that has another form.
// The weight of a key is 2^(logit * sm_scale_log2) over the sum of all with softmax, and the logit itself without.
// Hooks are written with the REGISTER_ macros; one that is not written costs nothing. A variant's own parameters are
// members of params: tensors as pointers to their elements (null where a maybe_ one is None), scalars by value, in the
// types that the module was asked for.
#pragma once

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>

#include <type_traits>

#if !defined(__CUDACC__)
// Variants qualify their functions for both sides; a C++ compiler knows one.
#define __host__
#define __device__
#define __forceinline__ inline
#endif

namespace flashinfer {

struct AttentionVariantBase {
  static constexpr bool use_softmax = true;
  static constexpr bool transforms_query = false, transforms_key = false, transforms_logits = false;
  static constexpr bool masks_logits = false, transforms_output = false;

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

template <typename Variant, typename = void>
constexpr bool has_window = false;
template <typename Variant>
constexpr bool has_window<Variant, std::void_t<decltype(&Variant::window_left)>> = true;

// Whether a variant has transform_pair(a, b): the LogitsTransform of two keys at once, both of which the query sees.
// One that a variant inherits does not count: its LogitsTransform may be another.
template <typename Variant, typename = void>
constexpr bool transforms_pairs = false;
template <typename Variant>
constexpr bool transforms_pairs<Variant, std::void_t<decltype(&Variant::transform_pair)>> =
    std::is_same_v<decltype(&Variant::transform_pair), void (Variant::*)(float&, float&) const>;

// Applies a variant's own window to the masks of a work item of its request. (A function that returned the masks would
// cost the kernels of other variants registers.)
template <typename Variant>
FLASHINFER_HD void narrow([[maybe_unused]] Mask& mask, [[maybe_unused]] const Variant& variant) {
  if constexpr (has_window<Variant>) {
    const auto window = static_cast<uint32_t>(variant.window_left);
    if (window < static_cast<uint32_t>(mask.window_left)) mask.window_left = static_cast<int32_t>(window);
  }
}

}  // namespace flashinfer

// An element of a query or a key before it is used, as float.
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
// The product q . k of one query and one key, as float. Called for queries and keys that there are alone, once for
// each, so that a variant may look up something by these numbers, or keep it.
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...) \
  static constexpr bool transforms_logits = true;                                                           \
  template <typename Params, typename T>                                                                    \
  FLASHINFER_HD T LogitsTransform([[maybe_unused]] const Params& params, T logits,                          \
                                  [[maybe_unused]] uint32_t batch_idx, [[maybe_unused]] uint32_t qo_idx,    \
                                  [[maybe_unused]] uint32_t kv_idx, [[maybe_unused]] uint32_t qo_head_idx,  \
                                  [[maybe_unused]] uint32_t kv_head_idx) const {                            \
    __VA_ARGS__                                                                                             \
  }
// Whether the query may see the key, besides the mask mode, the window and the lengths.
#define REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, ...)                        \
  static constexpr bool masks_logits = true;                                                                          \
  template <typename Params>                                                                                          \
  FLASHINFER_HD bool LogitsMask([[maybe_unused]] const Params& params, [[maybe_unused]] uint32_t batch_idx,           \
                                [[maybe_unused]] uint32_t qo_idx, [[maybe_unused]] uint32_t kv_idx,                   \
                                [[maybe_unused]] uint32_t qo_head_idx, [[maybe_unused]] uint32_t kv_head_idx) const { \
    __VA_ARGS__                                                                                                       \
  }
// An element of the finished output, as float.
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, ...)                   \
  static constexpr bool transforms_output = true;                                                        \
  template <typename Params, typename T>                                                                 \
  FLASHINFER_HD T OutputTransform([[maybe_unused]] const Params& params, T output,                       \
                                  [[maybe_unused]] uint32_t batch_idx, [[maybe_unused]] uint32_t qo_idx, \
                                  [[maybe_unused]] uint32_t qo_head_idx) const {                         \
    __VA_ARGS__                                                                                          \
  }
