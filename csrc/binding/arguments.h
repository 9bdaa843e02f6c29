// Operators with more arguments than a function should have: one list of X(type, name) gives the text of their schema,
// a struct with a member for each, and the unboxing of all of them into it.
//
// All are unboxed before any is looked at: each tensor is a reference to one, and what a check throws then gives all of
// them back.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "binding/boxing.h"

namespace flashinfer::binding {

using OptionalTensor = std::optional<Tensor>;

// Tensors that an operator writes to, by the letter that a schema marks them with.
template <char kMark>
struct Written : Tensor {};
template <char kMark>
struct WrittenOptional : OptionalTensor {};

template <typename T>
struct Argument;

template <typename T>
struct PlainArgument {
  static T take(StableIValue value) { return unboxed<T>(value); }
};

#define FLASHINFER_ARGUMENT_(T, type)         \
  template <>                                 \
  struct Argument<T> : PlainArgument<T> {     \
    static constexpr char kText[] = type " "; \
  };
FLASHINFER_ARGUMENT_(Tensor, "Tensor")
FLASHINFER_ARGUMENT_(OptionalTensor, "Tensor?")
FLASHINFER_ARGUMENT_(int64_t, "int")
FLASHINFER_ARGUMENT_(bool, "bool")
FLASHINFER_ARGUMENT_(double, "float")
FLASHINFER_ARGUMENT_(std::optional<double>, "float?")
#undef FLASHINFER_ARGUMENT_

template <char kMark>
struct Argument<Written<kMark>> {
  static constexpr char kText[] = {'T', 'e', 'n', 's', 'o', 'r', '(', kMark, '!', ')', ' ', 0};
  static Written<kMark> take(StableIValue value) { return {unboxed<Tensor>(value)}; }
};

template <char kMark>
struct Argument<WrittenOptional<kMark>> {
  static constexpr char kText[] = {'T', 'e', 'n', 's', 'o', 'r', '(', kMark, '!', ')', '?', ' ', 0};
  static WrittenOptional<kMark> take(StableIValue value) { return {unboxed<OptionalTensor>(value)}; }
};

// A loop over words: compilers take a second for as many sums of strings.
inline std::string joined(std::initializer_list<const char*> words) {
  std::string text;
  for (const char* word : words) text += word;
  return text;
}

#define FLASHINFER_MEMBER_(type, name) type name;
#define FLASHINFER_TAKE_(type, name) Argument<type>::take(*next++),
#define FLASHINFER_TEXT_(type, name) Argument<type>::kText, #name ", ",

// struct Name: the arguments of LIST(X), which `take` unboxes one after the other; `text` is theirs in a schema.
#define FLASHINFER_ARGUMENTS(Name, LIST)                                             \
  struct Name {                                                                      \
    LIST(FLASHINFER_MEMBER_)                                                         \
    static Name take(const StableIValue*& next) { return {LIST(FLASHINFER_TAKE_)}; } \
    static std::string text() { return joined({LIST(FLASHINFER_TEXT_)}); }           \
  };

// "op(Tensor q, int handle) -> ()" of structs of arguments, in their order.
template <typename... Lists>
std::string schema_of(const char* op, const char* result = "()") {
  std::string text;
  ((text += Lists::text()), ...);
  return std::string(op) + "(" + text.substr(0, text.size() - 2) + ") -> " + result;
}

}  // namespace flashinfer::binding
