// Norms with a quantised 8-bit result: parameters of the kernels.
#pragma once

#include <flashinfer/common/norm.h>
#include <flashinfer/common/quant_scale.h>

namespace flashinfer {

// output = x / sqrt(mean(x^2) + eps) * weight / scale, clamped to the finite range of the output's type.
struct RmsNormQuantParams : RmsNormTensors {
  QuantScale scale;
  DType dtype, output_dtype;

  FLASHINFER_HD double rcp_scale() const { return 1.0 / scale.get(); }
};

// output = ((x - mean(x)) / sqrt(var(x) + eps) * gamma + beta) / scale, where the dividend is rounded to x's
// type. The result is clamped as above.
struct LayerNormQuantParams : LayerNormTensors {
  QuantScale scale;
  DType dtype, output_dtype;
  bool affine_is_float32;

  FLASHINFER_HD double rcp_scale() const { return 1.0 / scale.get(); }
};

constexpr int kQuantBlock = 128;            // columns with one scale
constexpr float kMinBlockMaximum = 1e-10f;  // of a block of zeros

// residual += input; normed = residual / sqrt(mean(residual^2) + eps) * weight, from the unrounded sum. Each
// block of a row of normed, as rounded, has scale = max(amax, 1e-10) / 448 and output = normed / scale in
// e4m3.
struct RmsNormBlockQuantParams {
  const void* input;
  void* residual;
  const void* weight;
  void* normed;
  void* output;
  float* scale;                                                         // [hidden_size / 128, num_rows]
  int64_t input_stride, residual_stride, normed_stride, output_stride;  // of rows
  int64_t scale_block_stride, scale_row_stride;
  int64_t num_rows;
  int64_t hidden_size;
  Scalar eps;
  DType dtype;
};

struct Launch;
void rms_norm_quant(const RmsNormQuantParams& params, const Launch& launch);
void layer_norm_quant(const LayerNormQuantParams& params, const Launch& launch);
void rms_norm_block_quant(const RmsNormBlockQuantParams& params, const Launch& launch);

}  // namespace flashinfer
