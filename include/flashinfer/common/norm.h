// Norms over the last dimension: parameters of the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// Tensors and sizes of every RMSNorm. With `residual`, x = input + residual. Its value rounded to the element
// type is written back to `residual`.
struct RmsNormTensors {
  const void* input;
  void* residual;  // null without the fused addition
  const void* weight;
  void* output;
  Rows input_rows, residual_rows, output_rows;
  int64_t num_rows;
  int64_t hidden_size;
  Scalar eps;
};

// y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset).
struct RmsNormParams : RmsNormTensors {
  float weight_offset;  // 1 for Gemma
  DType dtype;
};

// Tensors and sizes of every LayerNorm. gamma and beta are float32 or of the input's type.
struct LayerNormTensors {
  const void* input;
  const void* gamma;
  const void* beta;
  void* output;
  Rows input_rows, output_rows;
  int64_t num_rows;
  int64_t hidden_size;
  Scalar eps;
};

// y = (x - mean(x)) / sqrt(var(x) + eps) * gamma + beta.
struct LayerNormParams : LayerNormTensors {
  DType dtype;
  bool affine_is_float32;
};

struct Launch;
void rms_norm(const RmsNormParams& params, const Launch& launch);
void layer_norm(const LayerNormParams& params, const Launch& launch);

}  // namespace flashinfer
