// Checks of one operator's arguments.
//
// A failed check throws "<Exception>: <op>: <argument>: got ..., wanted ...". flashinfer/_ops/declare.py
// turns the text into the Python exception. Everything is checked before anything is written.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

#include "binding/device.h"
#include "binding/overlap.h"
#include "binding/view.h"

namespace flashinfer::binding {

// Checks of one operator's arguments. Every failure names the operator and the argument.
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  [[noreturn]] void fail(const View& arg, const std::string& text) const { fail(arg.name, text); }
  [[noreturn]] void fail(const char* arg, const std::string& text, const char* kind = "ValueError") const {
    throw std::runtime_error(std::string(kind) + ": " + op_ + ": " + arg + ": " + text);
  }

  void that(bool holds, const char* arg, const char* text) const {
    if (!holds) fail(arg, text);
  }

  int32_t int32(const char* name, int64_t value) const {
    if (value < INT32_MIN || value > INT32_MAX) fail(name, "got " + std::to_string(value) + ", wanted an int32");
    return static_cast<int32_t>(value);
  }

  void rank(const View& arg, int64_t min_rank, int64_t max_rank) const {
    if (arg.ndim >= min_rank && arg.ndim <= max_rank) return;
    std::string wanted = std::to_string(min_rank);
    if (max_rank != min_rank) wanted += max_rank > 8 ? " or more" : " to " + std::to_string(max_rank);
    fail(arg, "got " + std::to_string(arg.ndim) + " dimensions, wanted " + wanted);
  }

  // Return the operator's number, or the tensor that replaces it.
  Scalar scalar(double value, const std::optional<Tensor>& tensor, const char* name, const View& like) const {
    if (!tensor) return {value, nullptr};
    const View arg(*tensor, name);
    dtype(arg, {DType::kFloat64});
    shape(arg, {});
    same_device(arg, like);
    return {value, static_cast<const double*>(arg.data)};
  }

  // Accept any size for -1.
  void shape(const View& arg, std::initializer_list<int64_t> wanted) const {
    bool same = arg.ndim == static_cast<int64_t>(wanted.size());
    const int64_t* got = arg.sizes;
    for (auto size = wanted.begin(); same && size != wanted.end(); ++size, ++got) same = *size < 0 || *size == *got;
    if (same) return;
    std::string text;
    for (const int64_t size : wanted)
      text += (text.empty() ? "" : ", ") + (size < 0 ? std::string("any") : std::to_string(size));
    fail(arg, "got shape " + shape_text(arg.sizes, arg.ndim) + ", wanted [" + text + "]");
  }

  void same_shape(const View& arg, const View& like) const {
    bool same = arg.ndim == like.ndim;
    for (int64_t i = 0; same && i < arg.ndim; ++i) same = arg.sizes[i] == like.sizes[i];
    if (same) return;
    fail(arg, "got shape " + shape_text(arg.sizes, arg.ndim) + ", wanted " + shape_text(like.sizes, like.ndim) +
                  " as " + like.name + " has");
  }

  void dtype(const View& arg, std::initializer_list<DType> wanted) const {
    for (DType one : wanted)
      if (arg.dtype == one) return;
    std::string text;
    for (DType one : wanted) text += (text.empty() ? "" : " or ") + std::string(to_string(one));
    fail(arg.name, std::string("got ") + to_string(arg.dtype) + ", wanted " + text, "TypeError");
  }

  void floating(const View& arg) const { dtype(arg, {DType::kFloat32, DType::kFloat16, DType::kBFloat16}); }

  // Element types of gradients. The CPU also takes float64, for numerical checks of gradients.
  void trainable(const View& arg) const {
    if (kOnCuda || arg.dtype != DType::kFloat64) floating(arg);
  }

  void same_dtype(const View& arg, const View& like) const {
    if (arg.dtype == like.dtype) return;
    fail(arg.name,
         std::string("got ") + to_string(arg.dtype) + ", wanted " + to_string(like.dtype) + " as " + like.name + " has",
         "TypeError");
  }

  void same_device(const View& arg, const View& like) const {
    if (arg.device_type == like.device_type && arg.device == like.device) return;
    fail(arg, "is on " + device_text(arg.device_type, arg.device) + ", another device than " + like.name + "'s " +
                  device_text(like.device_type, like.device));
  }

  void last_contiguous(const View& arg) const {
    if (arg.ndim == 0 || arg.size(-1) <= 1 || arg.stride(-1) == 1 || arg.numel == 0) return;
    fail(arg, "got stride " + std::to_string(arg.stride(-1)) + " of the last dimension, wanted 1");
  }

  void contiguous(const View& arg) const {
    int64_t expected = 1;
    for (int64_t dim = arg.ndim - 1; dim >= 0 && arg.numel > 0; --dim) {
      if (arg.sizes[dim] > 1 && arg.strides[dim] != expected)
        fail(arg, "is not contiguous, wanted a contiguous tensor");
      expected *= arg.sizes[dim];
    }
  }

  // torch aligns elements to their size. A pointer from another library may be unaligned.
  void aligned(const View& arg) const {
    if (reinterpret_cast<uintptr_t>(arg.data) % size_of(arg.dtype) == 0) return;
    fail(arg, "is not aligned to its element size of " + std::to_string(size_of(arg.dtype)) + " bytes");
  }

  // Require rows at multiples of 16 bytes on CUDA, where kernels read 16 bytes at a time.
  void wide_rows(const View& arg) const {
    if (!kOnCuda) return aligned(arg);
    bool fits = reinterpret_cast<uintptr_t>(arg.data) % 16 == 0;
    for (int64_t dim = 0; dim + 1 < arg.ndim; ++dim)
      fits = fits && (arg.sizes[dim] <= 1 || arg.strides[dim] * size_of(arg.dtype) % 16 == 0);
    if (!fits && arg.numel > 0) fail(arg, "got rows that do not start at multiples of 16 bytes, wanted .contiguous()");
  }

  // Reject an output whose elements share memory: they would be written twice. Elements are distinct if each
  // stride exceeds the reach of all smaller strides. This condition refuses some distinct layouts that torch
  // never makes.
  void writable(const View& arg) const {
    aligned(arg);
    if (arg.numel == 0) return;
    if (arg.ndim > 16) fail(arg, "got more than 16 dimensions");
    int64_t order[16], reach = 0;
    int count = 0;
    for (int64_t dim = 0; dim < arg.ndim; ++dim) {
      if (arg.sizes[dim] < 2) continue;
      int at = count++;
      for (; at > 0 && arg.strides[order[at - 1]] > arg.strides[dim]; --at) order[at] = order[at - 1];
      order[at] = dim;
    }
    for (int i = 0; i < count; ++i) {
      const int64_t stride = arg.strides[order[i]];
      if (stride <= reach) fail(arg, "has elements that share memory (stride " + std::to_string(stride) + ")");
      reach += (arg.sizes[order[i]] - 1) * stride;
    }
  }

  // Accept `out` if it shares no memory with `in`, or is exactly `in` and the operator works in place.
  void no_overlap(const View& out, const View& in, bool in_place_is_fine) const {
    if (overlaps(out, in) && !(in_place_is_fine && same_elements(out, in)))
      fail(out, "overlaps the memory of " + std::string(in.name));
  }

  // Merge the leading dimensions of [..., n] into at most three, because kernels loop over three.
  Rows rows(const View& arg) const {
    int found = 0;  // merged dimensions, inner first
    int64_t stride[3] = {0, 0, 0}, size[3] = {1, 1, 1};
    for (int64_t dim = arg.ndim - 2; dim >= 0; --dim) {
      if (arg.sizes[dim] == 1) continue;
      if (found > 0 && arg.strides[dim] == stride[found - 1] * size[found - 1]) {
        size[found - 1] *= arg.sizes[dim];
      } else if (found < 3) {
        stride[found] = arg.strides[dim], size[found] = arg.sizes[dim], ++found;
      } else if (arg.numel > 0) {
        fail(arg, "got leading dimensions that do not merge into three, wanted .contiguous()");
      }
    }
    const int64_t inner = size[0] < 1 ? 1 : size[0], middle = size[1] < 1 ? 1 : size[1];
    return {inner, middle, stride[2], stride[1], stride[0]};
  }

 private:
  const char* op_;
};

}  // namespace flashinfer::binding
