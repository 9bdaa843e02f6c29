// RMSNorm with a quantised 8-bit result: parameters of the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// output = x / sqrt(mean(x^2) + eps) * weight / scale, clamped to the finite range of the output's type. With
// `residual`, x = input + residual. Its value rounded to the element type is written back to `residual`.
struct RmsNormQuantParams {
  const void* input;
  void* residual;  // null without the fused addition
  const void* weight;
  void* output;
  Rows input_rows, residual_rows, output_rows;
  int64_t num_rows;
  int64_t hidden_size;
  Scalar eps, scale;
  const float* scale_at;  // address of the scale, or null
  DType dtype, output_dtype;

  FLASHINFER_HD double rcp_scale() const { return 1.0 / (scale_at ? static_cast<double>(*scale_at) : scale.get()); }
};

struct Launch;
void rms_norm_quant(const RmsNormQuantParams& params, const Launch& launch);

}  // namespace flashinfer
