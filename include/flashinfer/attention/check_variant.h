// Checks that a variant has the form that kernels need: one sentence per mistake, instead of the kernels'
// errors.
#pragma once

#include <flashinfer/attention/hopper_form.h>
#include <flashinfer/attention/variant.h>

#include <type_traits>
#include <utility>

namespace flashinfer {

namespace form {

template <typename V, typename = void>
constexpr bool is_complete = false;
template <typename V>
constexpr bool is_complete<V, std::void_t<decltype(sizeof(V))>> = true;

// True if use_softmax is static and a constant, so that the compiler can read it.
template <typename V, bool kStatic = !std::is_member_object_pointer_v<decltype(&V::use_softmax)>, typename = void>
constexpr bool knows_softmax = false;
template <typename V>
constexpr bool knows_softmax<V, true, std::void_t<std::bool_constant<static_cast<bool>(V::use_softmax)>>> = true;

template <typename V, typename = void>
constexpr bool has_scale = false;
template <typename V>
constexpr bool has_scale<V, std::void_t<decltype(static_cast<float>(std::declval<const V&>().sm_scale_log2))>> = true;

template <typename V, typename = void>
struct WindowType {
  using type = uint32_t;
};
template <typename V>
struct WindowType<V, std::void_t<decltype(std::declval<const V&>().window_left)>> {
  using type = std::decay_t<decltype(std::declval<const V&>().window_left)>;
};

// Types of the hooks as kernels call them, on a const variant.
template <typename V, typename P>
using QueryOf = decltype(static_cast<float>(std::declval<const V&>().QueryTransform(std::declval<const P&>(), 0.0f)));
template <typename V, typename P>
using KeyOf = decltype(static_cast<float>(std::declval<const V&>().KeyTransform(std::declval<const P&>(), 0.0f)));
template <typename V, typename P>
using LogitsOf = decltype(static_cast<float>(
    std::declval<const V&>().LogitsTransform(std::declval<const P&>(), 0.0f, 0u, 0u, 0u, 0u, 0u)));
template <typename V, typename P>
using MaskOf =
    decltype(static_cast<bool>(std::declval<const V&>().LogitsMask(std::declval<const P&>(), 0u, 0u, 0u, 0u, 0u)));
template <typename V, typename P>
using OutputOf =
    decltype(static_cast<float>(std::declval<const V&>().OutputTransform(std::declval<const P&>(), 0.0f, 0u, 0u, 0u)));
template <typename V, typename P>
using SumsOf = decltype(static_cast<float>(
    std::declval<const V&>().OutputTransform(std::declval<const P&>(), 0.0f, 0u, 0u, 0u, 0.0f, 0.0f, 0.0f)));

template <template <typename, typename> class Call, typename V, typename P, typename = void>
constexpr bool can_call = false;
template <template <typename, typename> class Call, typename V, typename P>
constexpr bool can_call<Call, V, P, std::void_t<Call<V, P>>> = true;

// True if a hook is inherited from the base, or has its own flag. Kernels read only the flag.
#define FLASHINFER_IS_REGISTERED(trait, flag, ...)                                          \
  template <typename V, typename P, typename = void>                                        \
  constexpr bool trait = &V::flag != &AttentionVariantBase::flag; /* of other parameters */ \
  template <typename V, typename P>                                                         \
  constexpr bool trait<V, P, std::void_t<decltype(&V::template __VA_ARGS__)>> =             \
      &V::flag != &AttentionVariantBase::flag ||                                            \
      std::is_same_v<decltype(&V::template __VA_ARGS__), decltype(&AttentionVariantBase::template __VA_ARGS__)>;
FLASHINFER_IS_REGISTERED(query, transforms_query, QueryTransform<P, float>)
FLASHINFER_IS_REGISTERED(key, transforms_key, KeyTransform<P, float>)
FLASHINFER_IS_REGISTERED(logits, transforms_logits, LogitsTransform<P, float>)
FLASHINFER_IS_REGISTERED(mask, masks_logits, LogitsMask<P>)
FLASHINFER_IS_REGISTERED(output, transforms_output, OutputTransform<P, float>)
#undef FLASHINFER_IS_REGISTERED

}  // namespace form

// Replace a variant that has a mistake, so that the sentence about it is the only error.
struct NoVariant : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  template <typename Params>
  FLASHINFER_HD NoVariant(const Params&, uint32_t, uint8_t*) {}
};

template <typename V, typename P>
struct VariantOfForm {
  static constexpr bool kHooks =
      form::query<V, P> && form::key<V, P> && form::logits<V, P> && form::mask<V, P> && form::output<V, P>;
  static constexpr bool kCalls =
      form::can_call<form::QueryOf, V, P> && form::can_call<form::KeyOf, V, P> &&
      form::can_call<form::LogitsOf, V, P> && form::can_call<form::MaskOf, V, P> &&
      (V::normalises_output ? form::can_call<form::SumsOf, V, P> : form::can_call<form::OutputOf, V, P>);
  static constexpr bool kConstructs = std::is_constructible_v<V, const P&, uint32_t, uint8_t*>;
  static constexpr bool kCopies = std::is_copy_constructible_v<V>;
  static constexpr bool kWindow = std::is_integral_v<typename form::WindowType<V>::type>;
  static constexpr bool kScale = !V::use_softmax || form::has_scale<V>;

  static_assert(kHooks, "a variant's hooks are written with the REGISTER_ macros: one without is never called");
  static_assert(kCalls, "a variant's hooks are const and return a number: write them with the REGISTER_ macros");
  static_assert(kConstructs, "a variant has a constructor (const Params&, uint32_t batch_idx, uint8_t* smem_ptr)");
  static_assert(kCopies, "a variant can be copied: every thread has one");
  static_assert(kWindow, "a variant's window_left is an integer, the number of keys that a query sees to its left");
  static_assert(kScale, "a variant that uses softmax has a member sm_scale_log2, log2(e) times the scale of logits");

  using type = std::conditional_t<kHooks && kCalls && kConstructs && kCopies && kWindow && kScale, V, NoVariant>;
};

// Check the properties that every later check depends on.
template <typename V, typename P>
constexpr auto variant_of_form() {
  if constexpr (!std::is_class_v<V>) {
    static_assert(std::is_class_v<V>, "a variant is a struct");
    return std::enable_if<true, NoVariant>();
  } else if constexpr (!form::is_complete<V>) {
    static_assert(form::is_complete<V>, "a variant is defined, not only declared");
    return std::enable_if<true, NoVariant>();
  } else if constexpr (!std::is_base_of_v<AttentionVariantBase, V>) {
    static_assert(std::is_base_of_v<AttentionVariantBase, V>, "a variant derives from AttentionVariantBase");
    return std::enable_if<true, NoVariant>();
  } else if constexpr (has_hopper_form<V>) {
    constexpr bool kConstructs = std::is_constructible_v<V, const MainloopParams<P>&, const BlockCoord&>;
    static_assert(kConstructs,
                  "a variant with GetAttentionUpdater() has a constructor (const MainloopParams&, const "
                  "BlockCoord&)");
    if constexpr (kConstructs) {
      return VariantOfForm<FromHopperForm<V>, P>();
    } else {
      return std::enable_if<true, NoVariant>();
    }
  } else if constexpr (!form::knows_softmax<V>) {
    static_assert(form::knows_softmax<V>, "a variant's use_softmax is a static constexpr bool");
    return std::enable_if<true, NoVariant>();
  } else {
    return VariantOfForm<V, P>();
  }
}

// The variant itself, if it has the form that kernels need with parameters of type P.
template <typename V, typename P>
using CheckedVariant = typename decltype(variant_of_form<V, P>())::type;

}  // namespace flashinfer
