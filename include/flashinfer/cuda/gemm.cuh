// Grouped products on CUDA by the types of numbers: each has a file of its own, so that they compile side by side.
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

// Those for Hopper alone; false where this binary has none for the device.
bool hopper_gemm_float16_by_depth(const GemmParams& params, const Launch& where);
bool hopper_gemm_float16_by_column(const GemmParams& params, const Launch& where);
bool hopper_gemm_bfloat16_by_depth(const GemmParams& params, const Launch& where);
bool hopper_gemm_bfloat16_by_column(const GemmParams& params, const Launch& where);
bool hopper_gemm_e4m3(const GemmParams& params, const Launch& where);

}  // namespace flashinfer::cuda
