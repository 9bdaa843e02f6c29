// Gradients of the norm family: parameters of the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// Gradients of y = x * r * w, with r = 1 / sqrt(mean(x^2) + eps), w = weight + weight_offset, grad = dL/dy:
//   dL/dx = r * (grad * w - x * r^2 * mean(grad * w * x)) + grad_sum
//   dL/dweight = sum over rows of grad * x * r
struct RmsNormBackwardParams {
  const void* grad;
  const void* input;
  const void* weight;
  const void* grad_sum;  // gradient that reaches x by other paths, or null
  void* grad_input;      // contiguous
  void* grad_weight;
  void* parts;  // num_parts rows of sums; see norm_backward_parts
  Rows grad_rows, input_rows, grad_sum_rows;
  int64_t num_rows, num_parts;
  int64_t hidden_size;
  Scalar eps;
  float weight_offset;
  DType dtype;
};

// Gradients of y = xh * gamma + beta, with xh = (x - mean(x)) * r:
//   dL/dx = r * (grad * gamma - mean(grad * gamma) - xh * mean(grad * gamma * xh))
//   dL/dgamma = sum over rows of grad * xh
//   dL/dbeta = sum over rows of grad
struct LayerNormBackwardParams {
  const void* grad;
  const void* input;
  const void* gamma;
  void* grad_input;  // contiguous
  void* grad_gamma;
  void* grad_beta;
  void* parts;
  Rows grad_rows, input_rows;
  int64_t num_rows, num_parts;
  int64_t hidden_size;
  Scalar eps;
  DType dtype;
  bool affine_is_float32;
};

struct Launch;

// Return the number of parts that the rows are summed in. One thread or CTA sums a part in the order of its
// rows. The parts are then added in order. Without atomics every run has the same bits. A part holds
// hidden_size sums for each weight, at most kPartBytes each.
int64_t norm_backward_parts(int64_t num_rows, int64_t hidden_size, const Launch& launch);
constexpr int64_t kPartBytes = 8;

void rms_norm_backward(const RmsNormBackwardParams& params, const Launch& launch);
void layer_norm_backward(const LayerNormBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
