// Element types, as values that bindings pass to a kernel's dispatch and as types of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(FLASHINFER_CUDA) || defined(__CUDACC__)
struct __half;
struct __nv_bfloat16;
#endif

namespace flashinfer {

constexpr float kMaxE4M3 = 448.0f;  // largest number of float8_e4m3fn

// Half types that variants name. These lines suffice for a binding because it dereferences no pointer.
#if defined(FLASHINFER_CUDA) || defined(__CUDACC__)
using half_t = __half;
using bfloat16_t = __nv_bfloat16;
#else
struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
#endif
struct fp8_e4m3_t {  // no infinities, NaN is all ones
  uint8_t bits;
};
struct fp8_e5m2_t {  // the upper byte of a half_t
  uint8_t bits;
};

enum class DType : int32_t {
  kOther,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kFloat8E4M3,
  kFloat8E5M2,
  kUInt16,
  kUInt32,
  kFloat64,
  kInt8,
  kInt16
};

constexpr const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return "float64";
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt8: return "uint8";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kBool: return "bool";
    case DType::kFloat8E4M3: return "float8_e4m3fn";
    case DType::kFloat8E5M2: return "float8_e5m2";
    case DType::kUInt16: return "uint16";
    case DType::kUInt32: return "uint32";
    case DType::kOther: break;
  }
  return "another dtype";
}

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
    case DType::kUInt16: return 2;
    case DType::kInt64: return 8;
    default: return 1;
  }
}

}  // namespace flashinfer
