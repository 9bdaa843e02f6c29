// RMSNorm whose result is quantised to numbers of eight bits: parameters shared by the binding and by the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// output = x / sqrt(mean(x^2) + eps) * weight / scale, clamped to the finite numbers of the output's type.
// With `residual`, x is input + residual, and is written back to `residual` rounded to the element type.
struct RmsNormQuantParams {
  const void* input;
  void* residual;  // null without the fused addition
  const void* weight;
  void* output;
  Rows input_rows, residual_rows, output_rows;
  int64_t num_rows;
  int64_t hidden_size;
  Scalar eps, scale;
  const float* scale_at;  // null, or where the scale is
  DType dtype, output_dtype;

  FLASHINFER_HD double rcp_scale() const { return 1.0 / (scale_at ? static_cast<double>(*scale_at) : scale.get()); }
};

struct Launch;
void rms_norm_quant(const RmsNormQuantParams& params, const Launch& launch);

}  // namespace flashinfer
