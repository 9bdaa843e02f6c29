// What every binding needs: views of torch tensors, checks of arguments, the current stream.
//
// Bindings are the only files that see torch, and they are compiled as C++ for every backend: nvcc takes six
// seconds for torch's headers where g++ takes one. Kernels live in files that see no torch at all.
//
// A failed check throws "<Exception>: <op>: <argument>: got ..., wanted ..."; flashinfer/_ops/declare.py turns that
// into the Python exception. Everything is checked before anything is written.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <initializer_list>
#include <optional>
#include <string>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/dtype.h>
#include <flashinfer/common/launch.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

#include "binding/boxing.h"

#if FLASHINFER_CUDA
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#define FLASHINFER_DISPATCH_KEY CUDA
constexpr bool kOnCuda = true;
#else
#define FLASHINFER_DISPATCH_KEY CPU
constexpr bool kOnCuda = false;
#endif

// Registers the operators of a binding for the backend that it is compiled for.
#define FLASHINFER_LIBRARY(m) FLASHINFER_LIBRARY_(flashinfer, FLASHINFER_DISPATCH_KEY, m)
#define FLASHINFER_LIBRARY_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

namespace flashinfer::binding {

inline void require(int32_t error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("torch refused ") + what);
}

// A tensor's facts, read once. `name` is the argument's, for messages.
struct View {
  const char* name;
  void* data;
  DType dtype;
  int device_type, device;
  int64_t ndim, numel;
  const int64_t* sizes;
  const int64_t* strides;  // in elements

  View(const Tensor& tensor, const char* argument) : name(argument) {
    // torch passes None as a tensor that is none.
    bool defined;
    require(aoti_torch_is_defined(tensor.get(), &defined), "the tensor");
    if (!defined) throw std::runtime_error(std::string("TypeError: ") + argument + ": got None, wanted Tensor");
    AtenTensorHandle handle = tensor.get();
    int32_t type, kind, index;
    int64_t *shape, *steps;
    require(aoti_torch_get_dtype(handle, &type), "the dtype");
    require(aoti_torch_get_device_type(handle, &kind), "the device");
    require(aoti_torch_get_device_index(handle, &index), "the device's index");
    require(aoti_torch_get_dim(handle, &ndim), "the rank");
    require(aoti_torch_get_numel(handle, &numel), "the number of elements");
    require(aoti_torch_get_sizes(handle, &shape), "the shape");
    require(aoti_torch_get_strides(handle, &steps), "the strides");
    require(aoti_torch_get_data_ptr(handle, &data), "the data");
    dtype = to_dtype(type), device_type = kind, device = index, sizes = shape, strides = steps;
  }

  int64_t size(int64_t dim) const { return sizes[dim < 0 ? dim + ndim : dim]; }
  int64_t stride(int64_t dim) const { return strides[dim < 0 ? dim + ndim : dim]; }

 private:
  static DType to_dtype(int32_t type) {
    if (type == aoti_torch_dtype_float64()) return DType::kFloat64;
    if (type == aoti_torch_dtype_float32()) return DType::kFloat32;
    if (type == aoti_torch_dtype_float16()) return DType::kFloat16;
    if (type == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
    if (type == aoti_torch_dtype_int32()) return DType::kInt32;
    if (type == aoti_torch_dtype_int64()) return DType::kInt64;
    if (type == aoti_torch_dtype_uint8()) return DType::kUInt8;
    if (type == aoti_torch_dtype_bool()) return DType::kBool;
    if (type == aoti_torch_dtype_float8_e4m3fn()) return DType::kFloat8E4M3;
    if (type == aoti_torch_dtype_float8_e5m2()) return DType::kFloat8E5M2;
    if (type == aoti_torch_dtype_uint16()) return DType::kUInt16;
    if (type == aoti_torch_dtype_uint32()) return DType::kUInt32;
    return DType::kOther;
  }
};

inline std::string shape_text(const int64_t* sizes, int64_t ndim) {
  std::string text = "[";
  for (int64_t i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// Checks of one operator's arguments; every failure names the operator and the argument.
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

  void rank(const View& arg, int64_t least, int64_t most) const {
    if (arg.ndim >= least && arg.ndim <= most) return;
    std::string wanted = std::to_string(least);
    if (most != least) wanted += most > 8 ? " or more" : " to " + std::to_string(most);
    fail(arg, "got " + std::to_string(arg.ndim) + " dimensions, wanted " + wanted);
  }

  // An operator's number, or the tensor that has it instead.
  Scalar scalar(double value, const std::optional<Tensor>& tensor, const char* name, const View& like) const {
    if (!tensor) return {value, nullptr};
    const View arg(*tensor, name);
    dtype(arg, {DType::kFloat64});
    shape(arg, {});
    same_device(arg, like);
    return {value, static_cast<const double*>(arg.data)};
  }

  // -1 stands for any size.
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

  // What gradients are for: float64 too where they can be checked in it.
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
    fail(arg, "is on another device than " + std::string(like.name));
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

  // Elements lie at multiples of their size wherever torch made the tensor; a foreign pointer may not.
  void aligned(const View& arg) const {
    if (reinterpret_cast<uintptr_t>(arg.data) % size_of(arg.dtype) == 0) return;
    fail(arg, "is not aligned to its element size of " + std::to_string(size_of(arg.dtype)) + " bytes");
  }

  // Where CUDA kernels read 16 bytes at a time.
  void wide_rows(const View& arg) const {
    if (!kOnCuda) return aligned(arg);
    bool fits = reinterpret_cast<uintptr_t>(arg.data) % 16 == 0;
    for (int64_t dim = 0; dim + 1 < arg.ndim; ++dim)
      fits = fits && (arg.sizes[dim] <= 1 || arg.strides[dim] * size_of(arg.dtype) % 16 == 0);
    if (!fits && arg.numel > 0) fail(arg, "got rows that do not start at multiples of 16 bytes, wanted .contiguous()");
  }

  // An output whose elements share memory would be written twice. They share none where each stride leads beyond what
  // the smaller ones reach; tensors that are torn apart otherwise do not occur.
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

  // `out` may be exactly `in` (in place) where the operator allows it, or lie wholly elsewhere.
  void no_overlap(const View& out, const View& in, bool in_place_is_fine) const {
    if (out.numel == 0 || in.numel == 0) return;
    const auto [out_low, out_high] = extent(out);
    const auto [in_low, in_high] = extent(in);
    if (out_high <= in_low || in_high <= out_low) return;
    if (in_place_is_fine && out.data == in.data && out.ndim == in.ndim) {
      bool same = true;
      for (int64_t i = 0; i < out.ndim; ++i)
        same = same && out.sizes[i] == in.sizes[i] && (out.sizes[i] <= 1 || out.strides[i] == in.strides[i]);
      if (same) return;
    }
    if (interleaved(out, in)) return;
    fail(out, "overlaps the memory of " + std::string(in.name));
  }

  // The leading dimensions of [..., n] as at most two: what kernels walk.
  Rows rows(const View& arg) const {
    Rows result{1, 0, 0};
    int found = 0;  // dimensions kept, inner first
    int64_t stride[2] = {0, 0}, size[2] = {1, 1};
    for (int64_t dim = arg.ndim - 2; dim >= 0; --dim) {
      if (arg.sizes[dim] == 1) continue;
      if (found > 0 && arg.strides[dim] == stride[found - 1] * size[found - 1]) {
        size[found - 1] *= arg.sizes[dim];
      } else if (found < 2) {
        stride[found] = arg.strides[dim], size[found] = arg.sizes[dim], ++found;
      } else if (arg.numel > 0) {
        fail(arg, "got strides that no two leading dimensions express, wanted .contiguous()");
      }
    }
    result.inner = size[0] < 1 ? 1 : size[0], result.inner_stride = stride[0], result.outer_stride = stride[1];
    return result;
  }

 private:
  static std::pair<const char*, const char*> extent(const View& arg) {
    const char *low = static_cast<const char*>(arg.data), *high = low;
    for (int64_t i = 0; i < arg.ndim; ++i) {
      const int64_t reach = (arg.sizes[i] - 1) * arg.strides[i] * size_of(arg.dtype);
      (reach < 0 ? low : high) += reach;
    }
    return {low, high + size_of(arg.dtype)};
  }

  // Views of one larger tensor (column ranges of a fused projection, K and V of one paged cache) cross in memory
  // without sharing an element. With equal strides, an element is shared where sum((i - j) * stride) == `apart` has a
  // solution.
  static bool interleaved(const View& a, const View& b) {
    const int64_t width = size_of(a.dtype), apart = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
    if (a.ndim != b.ndim || a.ndim > 16 || size_of(b.dtype) != width || apart % width != 0) return false;
    Step steps[16];
    int count = 0;
    for (int64_t i = 0; i < a.ndim; ++i) {
      if (a.sizes[i] > 1 && b.sizes[i] > 1 && a.strides[i] != b.strides[i]) return false;
      const int64_t stride = a.sizes[i] > 1 ? a.strides[i] : b.strides[i];
      if ((a.sizes[i] == 1 && b.sizes[i] == 1) || stride == 0) continue;
      int at = count++;
      for (; at > 0 && steps[at - 1].stride > stride; --at) steps[at] = steps[at - 1];
      steps[at] = {stride, a.sizes[i] - 1, b.sizes[i] - 1};
    }
    return !meet(steps, count, apart / width);
  }

  struct Step {
    int64_t stride, forward, back;  // the index's difference is in [-back, forward]
  };

  // Whether some differences of the first `count` steps (rising strides) lead `apart`; yes where that is hard to tell.
  static bool meet(const Step* steps, int count, int64_t apart) {
    if (count == 0) return apart == 0;
    const Step& step = steps[count - 1];
    int64_t forward = 0, back = 0;  // as far as the smaller steps reach
    for (int i = 0; i + 1 < count; ++i)
      forward += steps[i].forward * steps[i].stride, back += steps[i].back * steps[i].stride;
    constexpr int64_t kTries = 4;
    int64_t first = (apart - forward) / step.stride - 1, last = (apart + back) / step.stride + 1;
    if (first < -step.back) first = -step.back;
    if (last > step.forward) last = step.forward;
    if (last - first > kTries) return true;
    for (int64_t by = first; by <= last; ++by) {
      const int64_t rest = apart - by * step.stride;
      if (rest <= forward && rest >= -back && meet(steps, count - 1, rest)) return true;
    }
    return false;
  }

  const char* op_;
};

// A new tensor of a shape, with the device of another, and with its element type where none is given.
inline Tensor empty(const int64_t* sizes, int64_t ndim, const Tensor& like, std::optional<int32_t> dtype = {}) {
  int32_t type, kind, index;
  require(aoti_torch_get_dtype(like.get(), &type), "the dtype");
  require(aoti_torch_get_device_type(like.get(), &kind), "the device");
  require(aoti_torch_get_device_index(like.get(), &index), "the device's index");
  int64_t strides[16], step = 1;
  if (ndim > 16) throw_value_error("got more than 16 dimensions");
  for (int64_t i = ndim - 1; i >= 0; --i) strides[i] = step, step *= sizes[i] > 1 ? sizes[i] : 1;
  AtenTensorHandle handle;
  require(aoti_torch_empty_strided(ndim, sizes, strides, dtype.value_or(type), kind, index, &handle),
          "memory for an output");
  return Tensor(handle);
}

// Bytes on the device of another tensor, for a kernel to work in.
inline Tensor empty_bytes(int64_t count, const Tensor& like) {
  int32_t kind, index;
  require(aoti_torch_get_device_type(like.get(), &kind), "the device");
  require(aoti_torch_get_device_index(like.get(), &index), "the device's index");
  const int64_t stride = 1;
  AtenTensorHandle handle;
  require(aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_uint8(), kind, index, &handle), "a workspace");
  return Tensor(handle);
}

inline Tensor empty_like(const View& view, const Tensor& like) { return empty(view.sizes, view.ndim, like); }

// The device of an operator's tensors for the life of this object, and the stream to launch on.
class OnDevice {
 public:
  explicit OnDevice(const View& arg, std::optional<bool> enable_pdl = std::nullopt)
      : launch_{nullptr, arg.device, enable_pdl ? *enable_pdl : -1} {
#if FLASHINFER_CUDA
    int32_t current;
    require(aoti_torch_get_current_device_index(&current), "the current device");
    if (current != arg.device) guard_.emplace(arg.device);
    require(aoti_torch_get_current_cuda_stream(arg.device, &launch_.stream), "the current stream");
#endif
  }

  operator const Launch&() const { return launch_; }

 private:
  Launch launch_;
#if FLASHINFER_CUDA
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif
};

}  // namespace flashinfer::binding
