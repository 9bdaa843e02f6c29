// Dispatch of run-time values to compile-time constants. A module's configuration header, rendered from
// csrc/config.h.jinja, defines DISPATCH_<axis> with these functions. It lists the module's values as data.
#pragma once

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include <flashinfer/common/dtype.h>

namespace flashinfer {

// Report a mistake of the caller. Python raises the exception that the text's first word names.
[[noreturn]] inline void throw_value_error(const std::string& text) { throw std::runtime_error("ValueError: " + text); }

[[noreturn]] inline void throw_not_covered(const char* axis, const std::string& got, const char* built_for) {
  throw_value_error(std::string(axis) + ": got " + got + ", this module was built for " + built_for);
}

// Return a value of an axis as a tuple: of a number, of a DType, or of several constants.
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

// Return the index of a row in a list, or -1.
template <typename Row, std::size_t kRows>
constexpr int find_row(const Row (&rows)[kRows], const Row& target) {
  for (std::size_t i = 0; i < kRows; ++i)
    if (rows[i] == target) return static_cast<int>(i);
  return -1;
}

// Report a mistake of the caller if the module was not built for this value.
template <typename Row, std::size_t kRows, typename T>
void require_value(const char* axis, const Row (&rows)[kRows], const T& value, const char* built_for) {
  const Row row = axis_value(value);
  if (find_row(rows, row) < 0) throw_not_covered(axis, axis_text(row), built_for);
}

// Call body(std::integral_constant<int, number>) for a number in [0, kCount).
template <int kCount, typename Body>
auto call_numbered(int number, const Body& body) {
  if constexpr (kCount > 1)
    if (number != kCount - 1) return call_numbered<kCount - 1>(number, body);
  return body(std::integral_constant<int, kCount - 1>{});
}

// Call the body with the index of the row that equals the value.
template <typename Row, std::size_t kRows, typename T, typename Body>
auto call_row(const char* axis, const Row (&rows)[kRows], const T& value, const char* built_for, const Body& body) {
  require_value(axis, rows, value, built_for);
  return call_numbered<static_cast<int>(kRows)>(find_row(rows, Row(axis_value(value))), body);
}

}  // namespace flashinfer

// One case of DISPATCH_<axis>: the body after `declarations`, which stand in parentheses.
#define _DISPATCH_CASE(condition, declarations, ...) \
  if (condition) {                                   \
    _DISPATCH_DECLARE declarations __VA_ARGS__;      \
  } else
#define _DISPATCH_DECLARE(...) __VA_ARGS__
