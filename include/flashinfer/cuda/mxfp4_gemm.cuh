// Grouped GEMM with MXFP4 matrices on CUDA, by the type of the rows. Each type is compiled in a file of its
// own, so that they compile in parallel.
#pragma once

#include <flashinfer/common/launch.h>
#include <flashinfer/common/mxfp4_gemm.h>

namespace flashinfer::cuda {

void mxfp4_gemm_float16(const Mxfp4GemmParams& params, const Launch& where);
void mxfp4_gemm_bfloat16(const Mxfp4GemmParams& params, const Launch& where);

}  // namespace flashinfer::cuda
