// Instances of the 9.0a kernels of grouped GEMM. Each has a file of its own in csrc/gemm/, so that they
// compile in parallel. They return false if the module has no code for the device.
#pragma once

#include <flashinfer/common/gemm.h>
#include <flashinfer/common/launch.h>

namespace flashinfer::cuda::sm90 {

bool gemm_float16_by_depth(const GemmParams& params, const Launch& where);
bool gemm_float16_by_column(const GemmParams& params, const Launch& where);
bool gemm_bfloat16_by_depth(const GemmParams& params, const Launch& where);
bool gemm_bfloat16_by_column(const GemmParams& params, const Launch& where);
bool gemm_e4m3(const GemmParams& params, const Launch& where);

}  // namespace flashinfer::cuda::sm90
