// Grouped GEMM on CUDA by element type. Each type is compiled in a file of its own, so that they compile in
// parallel.
#pragma once

#include <flashinfer/common/gemm.h>
#include <flashinfer/common/launch.h>

namespace flashinfer::cuda {

void grouped_gemm_float32(const GemmParams& params, const Launch& where);
void grouped_gemm_float16(const GemmParams& params, const Launch& where);
void grouped_gemm_bfloat16(const GemmParams& params, const Launch& where);
void grouped_gemm_e4m3_e4m3(const GemmParams& params, const Launch& where);
void grouped_gemm_e4m3_e4m3_blocks(const GemmParams& params, const Launch& where);
void grouped_gemm_e4m3_e5m2(const GemmParams& params, const Launch& where);
void grouped_gemm_e4m3_e5m2_blocks(const GemmParams& params, const Launch& where);
void grouped_gemm_e5m2_e4m3(const GemmParams& params, const Launch& where);
void grouped_gemm_e5m2_e4m3_blocks(const GemmParams& params, const Launch& where);
void grouped_gemm_e5m2_e5m2(const GemmParams& params, const Launch& where);
void grouped_gemm_e5m2_e5m2_blocks(const GemmParams& params, const Launch& where);

// Kernels for one arch. A file of csrc/gemm/ registers them, see Registered. They are parts of this module,
// because some reasons against them, such as unaligned pointers, are known only per call, even in a graph.
struct GemmKernels {
  int32_t arch;                                          // 90 for 9.0a
  const char* (*run)(const GemmParams&, const Launch&);  // launches and returns null, or returns why it cannot serve
};

}  // namespace flashinfer::cuda
