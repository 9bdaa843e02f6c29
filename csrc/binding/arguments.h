// Operators with more arguments than a function should have. One list of X(type, name) makes the text of the
// schema, a struct with a member per argument, and the unboxing of all arguments into it.
//
// All arguments are unboxed before any check: each tensor holds a reference, and unwinding releases all of
// them.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "binding/boxing.h"

namespace flashinfer::binding {

using OptionalTensor = std::optional<Tensor>;

// A tensor that an operator writes to, with the letter that marks it in the schema.
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

// Concatenates words in a loop: compilers need a second for as many sums of strings.
inline std::string joined(std::initializer_list<const char*> words) {
  std::string text;
  for (const char* word : words) text += word;
  return text;
}

#define FLASHINFER_MEMBER_(type, name) type name;
#define FLASHINFER_TAKE_(type, name) Argument<type>::take(*next++),
#define FLASHINFER_TEXT_(type, name) Argument<type>::kText, #name ", ",

// struct Name: the arguments of LIST(X). `take` unboxes them in order, and `text` is their part of the
// schema.
#define FLASHINFER_ARGUMENTS(Name, LIST)                                             \
  struct Name {                                                                      \
    LIST(FLASHINFER_MEMBER_)                                                         \
    static Name take(const StableIValue*& next) { return {LIST(FLASHINFER_TAKE_)}; } \
    static std::string text() { return joined({LIST(FLASHINFER_TEXT_)}); }           \
  };

// Return "op(Tensor q, int handle) -> ()" for structs of arguments, in their order.
template <typename... Lists>
std::string schema_of(const char* op, const char* result = "()") {
  std::string text;
  ((text += Lists::text()), ...);
  return std::string(op) + "(" + text.substr(0, text.size() - 2) + ") -> " + result;
}

}  // namespace flashinfer::binding
