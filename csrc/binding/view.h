// Properties of torch tensors, read once.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <flashinfer/common/dtype.h>

#include "binding/boxing.h"

namespace flashinfer::binding {

inline void require(int32_t error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string("torch refused ") + what);
}

// Throws after a failed allocation: torch has tried everything and reports only that no memory is left.
inline void require_memory(int32_t error, const char* purpose) {
  if (error != 0) throw std::runtime_error(std::string("OutOfMemoryError: no memory for ") + purpose);
}

inline std::string device_text(int type, int index) {
  return type == aoti_torch_device_type_cpu() ? "cpu" : "cuda:" + std::to_string(index);
}

// Properties of a tensor, read once. `name` is the argument's name in error texts.
struct View {
  const char* name;
  void* data;
  DType dtype;
  int device_type, device;
  int64_t ndim, numel;
  const int64_t* sizes;
  const int64_t* strides;  // in elements

  View(const Tensor& tensor, const char* argument) : name(argument) {
    // torch passes None as an undefined tensor.
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
    if (type == aoti_torch_dtype_int8()) return DType::kInt8;
    if (type == aoti_torch_dtype_int16()) return DType::kInt16;
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

}  // namespace flashinfer::binding
