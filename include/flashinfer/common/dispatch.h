// From run-time values to compile-time ones. A module's configuration header, rendered from csrc/config.h.jinja,
// defines DISPATCH_<axis> for every axis with these.
#pragma once

#include <stdexcept>
#include <string>

#include <flashinfer/common/dtype.h>

namespace flashinfer {

// The caller's mistake: the Python boundary turns the word in front into the exception of that name.
[[noreturn]] inline void throw_value_error(const std::string& text) { throw std::runtime_error("ValueError: " + text); }

[[noreturn]] inline void throw_not_covered(const char* axis, const std::string& got, const char* built_for) {
  throw_value_error(std::string(axis) + ": got " + got + ", this module was built for " + built_for);
}

}  // namespace flashinfer

// One case of a switch over element types: inside, `T` names the type.
#define FLASHINFER_TYPE_CASE(value, type, T, ...) \
  case value: {                                   \
    using T = type;                               \
    __VA_ARGS__;                                  \
    break;                                        \
  }
