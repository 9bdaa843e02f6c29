// From run-time values to compile-time ones. A module's configuration header, rendered from csrc/config.h.jinja,
// defines DISPATCH_<axis> for every axis with these, and lists what the module was built for as data.
#pragma once

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include <flashinfer/common/dtype.h>

namespace flashinfer {

// The caller's mistake: the Python boundary turns the word in front into the exception of that name.
[[noreturn]] inline void throw_value_error(const std::string& text) { throw std::runtime_error("ValueError: " + text); }

[[noreturn]] inline void throw_not_covered(const char* axis, const std::string& got, const char* built_for) {
  throw_value_error(std::string(axis) + ": got " + got + ", this module was built for " + built_for);
}

// A value of an axis: a number, a DType, or a tuple of them where the axis has several constants.
template <typename T>
constexpr auto axis_value(T value) {
  if constexpr (std::is_same_v<T, DType>) {
    return std::tuple<DType>(value);
  } else {
    return std::tuple<int>(static_cast<int>(value));
  }
}
template <typename... T>
constexpr std::tuple<T...> axis_value(const std::tuple<T...>& value) {
  return value;
}

inline std::string axis_text(DType dtype) { return to_string(dtype); }
inline std::string axis_text(int number) { return std::to_string(number); }
template <typename... T>
std::string axis_text(const std::tuple<T...>& value) {
  std::string text;
  std::apply([&](const auto&... part) { ((text += (text.empty() ? "" : ":") + axis_text(part)), ...); }, value);
  return text;
}

// Where a row stands in a list, or -1.
template <typename Row, std::size_t kRows>
constexpr int find_row(const Row (&rows)[kRows], const Row& wanted) {
  for (std::size_t i = 0; i < kRows; ++i)
    if (rows[i] == wanted) return static_cast<int>(i);
  return -1;
}

// Throws the caller's mistake where a value is none of those that a module was built for.
template <typename Row, std::size_t kRows, typename T>
void require_value(const char* axis, const Row (&rows)[kRows], const T& value, const char* built_for) {
  const Row row = axis_value(value);
  if (find_row(rows, row) < 0) throw_not_covered(axis, axis_text(row), built_for);
}

// Calls body(std::integral_constant<int, number>) for a number in [0, kCount).
template <int kCount, typename Body>
auto call_numbered(int number, const Body& body) {
  if constexpr (kCount > 1)
    if (number != kCount - 1) return call_numbered<kCount - 1>(number, body);
  return body(std::integral_constant<int, kCount - 1>{});
}

// The same for the row that a value is.
template <typename Row, std::size_t kRows, typename T, typename Body>
auto call_row(const char* axis, const Row (&rows)[kRows], const T& value, const char* built_for, const Body& body) {
  require_value(axis, rows, value, built_for);
  return call_numbered<static_cast<int>(kRows)>(find_row(rows, Row(axis_value(value))), body);
}

}  // namespace flashinfer

// A case of DISPATCH_<axis>: the body with the constants that `declarations`, in parentheses, gives it.
#define _DISPATCH_CASE(condition, declarations, ...) \
  if (condition) {                                   \
    _DISPATCH_DECLARE declarations __VA_ARGS__;      \
  } else
#define _DISPATCH_DECLARE(...) __VA_ARGS__
