// Tensor maps for TMA, made on the host. The runtime finds the driver's function: nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include <flashinfer/common/dtype.h>

namespace flashinfer::cuda {

template <typename T>
constexpr CUtensorMapDataType map_type() {
  if (sizeof(T) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return __is_same(T, bfloat16_t) ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// A tensor of kRank dimensions, the contiguous one first.
template <int kRank>
struct MapShape {
  const void* data;
  uint64_t sizes[kRank];
  int64_t strides[kRank];  // in elements; the first is 1
  uint32_t box[kRank];     // elements of one copy
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled find_encode_tiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error("tensor map: this driver has no cuTensorMapEncodeTiled, wanted one of CUDA 12 or later");
  return reinterpret_cast<EncodeTiled>(found);
}

// Return a map whose boxes have rows of kWidth bytes in smem, swizzled. The box's first side has at most
// kWidth bytes.
template <int kWidth, int kRank>
CUtensorMap tensor_map(CUtensorMapDataType type, int64_t element_bytes, const MapShape<kRank>& shape) {
  static_assert(kWidth == 128 || kWidth == 64 || kWidth == 32, "a swizzle of 128, 64 or 32 bytes");
  static const EncodeTiled encode = find_encode_tiled();
  cuuint64_t sizes[kRank], strides[kRank] = {};
  cuuint32_t steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    sizes[i] = shape.sizes[i] > 0 ? shape.sizes[i] : 1, steps[i] = 1;
    if (i == 0) continue;
    strides[i - 1] = static_cast<cuuint64_t>(shape.strides[i] * element_bytes);
    if (shape.sizes[i] <= 1 && strides[i - 1] % 16 != 0)
      strides[i - 1] = 16;  // the stride of one element may be any number
  }
  constexpr CUtensorMapSwizzle kSwizzle = kWidth == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                          : kWidth == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_32B;
  // The driver's call needs a current context, and a thread that has called no runtime function has none
  // (autograd's threads begin so: error 201). Setting the thread's device makes the primary context current.
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess)
    throw std::runtime_error("tensor map: this thread's device cannot be set");
  CUtensorMap map;
  const CUresult result = encode(&map, type, kRank, const_cast<void*>(shape.data), sizes, strides, shape.box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::string text;
    for (int i = 0; i < kRank; ++i)
      text += (i ? ", " : "") + std::to_string(shape.sizes[i]) + ":" + std::to_string(shape.strides[i]) + ":" +
              std::to_string(shape.box[i]);
    throw std::runtime_error("tensor map: cuTensorMapEncodeTiled returned " + std::to_string(result) +
                             " for size:stride:box " + text);
  }
  return map;
}

}  // namespace flashinfer::cuda
