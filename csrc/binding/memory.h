// New tensors: outputs and workspaces of kernels.
#pragma once

#include <cstdint>
#include <optional>

#include <flashinfer/common/dispatch.h>

#include "binding/view.h"

namespace flashinfer::binding {

// Return a new tensor of a shape on the device of `like`, by default with its element type.
inline Tensor empty(const int64_t* sizes, int64_t ndim, const Tensor& like, std::optional<int32_t> dtype = {}) {
  int32_t type, kind, index;
  require(aoti_torch_get_dtype(like.get(), &type), "the dtype");
  require(aoti_torch_get_device_type(like.get(), &kind), "the device");
  require(aoti_torch_get_device_index(like.get(), &index), "the device's index");
  int64_t strides[16], step = 1;
  if (ndim > 16) throw_value_error("got more than 16 dimensions");
  for (int64_t i = ndim - 1; i >= 0; --i) strides[i] = step, step *= sizes[i] > 1 ? sizes[i] : 1;
  AtenTensorHandle handle;
  require_memory(aoti_torch_empty_strided(ndim, sizes, strides, dtype.value_or(type), kind, index, &handle),
                 "an output");
  return Tensor(handle);
}

// Return uninitialised bytes on the device of `like`, as workspace of a kernel.
inline Tensor empty_bytes(int64_t count, const Tensor& like) {
  int32_t kind, index;
  require(aoti_torch_get_device_type(like.get(), &kind), "the device");
  require(aoti_torch_get_device_index(like.get(), &index), "the device's index");
  const int64_t stride = 1;
  AtenTensorHandle handle;
  require_memory(aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_uint8(), kind, index, &handle),
                 "a workspace");
  return Tensor(handle);
}

inline Tensor empty_like(const View& view, const Tensor& like) { return empty(view.sizes, view.ndim, like); }

}  // namespace flashinfer::binding
