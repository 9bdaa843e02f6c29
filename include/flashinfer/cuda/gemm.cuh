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

// Hopper kernels. They return false if the module has no code for the device.
bool hopper_gemm_float16_by_depth(const GemmParams& params, const Launch& where);
bool hopper_gemm_float16_by_column(const GemmParams& params, const Launch& where);
bool hopper_gemm_bfloat16_by_depth(const GemmParams& params, const Launch& where);
bool hopper_gemm_bfloat16_by_column(const GemmParams& params, const Launch& where);
bool hopper_gemm_e4m3(const GemmParams& params, const Launch& where);

}  // namespace flashinfer::cuda
