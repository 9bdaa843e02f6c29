// Calls that the Hopper kernels of grouped GEMM serve.
#pragma once

#include <cstdint>

#include <flashinfer/common/gemm.h>

namespace flashinfer::cuda::sm90 {

// Return the distance of `count` rows, or -1 if it varies.
inline int64_t stride_of(const Rows& rows, int64_t count) {
  if (count > rows.inner) {
    if (rows.middle_stride != rows.inner * rows.inner_stride) return -1;
    if ((count - 1) / rows.inner >= rows.middle && rows.outer_stride != rows.middle * rows.middle_stride) return -1;
  }
  return count > 1 ? rows.inner_stride : 0;
}

inline bool is_aligned(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

// Return the reason why the kernels do not serve a call, or null if they do.
inline const char* reason_against(const GemmParams& p) {
  const bool fp8 = p.a_dtype == DType::kFloat8E4M3 && p.b_dtype == DType::kFloat8E4M3;
  const int64_t bytes = fp8 ? 1 : 2, stride = stride_of(p.a_layout, p.a_num_rows);
  if (!fp8 && p.a_dtype != DType::kBFloat16 && p.a_dtype != DType::kFloat16)
    return "operands are neither bfloat16, float16 nor float8_e4m3fn";
  if (!fp8 && (p.a_scale.data || p.b_scale.data)) return "there are scales of operands of 16 bits";
  if (p.scale_depth % 128 != 0) return "scales are for fewer than 128 numbers of the depth, or no multiple of them";
  if (p.a_rows && p.k * bytes % 16 != 0) return "rows of a are gathered and are no multiple of 16 bytes";
  if (p.a_rows && p.a_num_rows * stride * bytes > INT64_C(1) << 35)
    return "rows of a are gathered from too much memory";
  const bool by_depth = p.b_stride_k == 1;
  const int64_t b_stride = by_depth ? p.b_stride_n : p.b_stride_k, b_rows = by_depth ? p.n : p.k;
  if (p.k < 1 || p.k > INT32_MAX / 2 || p.m > INT32_MAX / 2 || p.n > INT32_MAX / 2 || p.a_num_rows > INT32_MAX / 2 ||
      p.num_groups > INT32_MAX / 2 || p.num_matrices > INT32_MAX / 2 || p.m * p.n > INT64_C(1) << 36)
    return "there is no depth, or a size is too large";
  if (stride < 0 || stride_of(p.out_layout, p.m) < 0) return "rows of a or of out are not equally far apart";
  if (p.a_num_rows > 1 && stride < p.k) return "rows of a overlap";
  if (!is_aligned(p.a, 16) || !is_aligned(p.b, 16) || stride * bytes % 16 != 0 ||
      (b_rows > 1 && b_stride * bytes % 16 != 0) || (p.num_matrices > 1 && p.b_matrix_stride * bytes % 16 != 0))
    return "rows do not begin at multiples of 16 bytes";
  const int64_t b_row = by_depth ? p.k : p.n;
  if ((b_rows > 1 && b_stride < b_row) || (p.num_matrices > 1 && p.b_matrix_stride < b_row)) return "rows of b overlap";
  return nullptr;
}

// Return true if the gate can be fused too: its results leave in lines of 16 bytes.
inline bool serves_gate(const GemmParams& p) {
  return p.a_dtype != DType::kFloat32 && p.b_stride_k == 1 && p.n % 16 == 0 && is_aligned(p.out, 16) &&
         stride_of(p.out_layout, p.m) % 8 == 0 && p.b_stride_n % 8 == 0;
}

}  // namespace flashinfer::cuda::sm90
