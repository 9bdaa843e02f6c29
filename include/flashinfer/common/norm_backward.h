// Gradients of the norm family: parameters shared by the binding and by the kernels of every backend.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// Of y = x * r * w with r = 1 / sqrt(mean(x^2) + eps) and w = weight + weight_offset, given grad = dL/dy:
//   dL/dx = r * (grad * w - x * r^2 * mean(grad * w * x)) + grad_sum
//   dL/dweight = sum over rows of grad * x * r
struct RmsNormBackwardParams {
  const void* grad;
  const void* input;
  const void* weight;
  const void* grad_sum;  // what arrives at x from elsewhere; null where nothing does
  void* grad_input;      // contiguous
  void* grad_weight;
  void* parts;  // num_parts rows of sums, see below
  Rows grad_rows, input_rows, grad_sum_rows;
  int64_t num_rows, num_parts;
  int64_t hidden_size;
  Scalar eps;
  float weight_offset;
  DType dtype;
};

// Of y = xh * gamma + beta with xh = (x - mean(x)) * r:
//   dL/dx = r * (grad * gamma - mean(grad * gamma) - xh * mean(grad * gamma * xh))
//   dL/dgamma = sum over rows of grad * xh, dL/dbeta = sum over rows of grad
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

// How many parts the rows are summed in. Each part is summed by one thread or block in the order of its rows, then the
// parts in theirs: no atomics, the same bits in every run. A part is hidden_size sums for each weight, of at most
// kPartBytes each.
int64_t norm_backward_parts(int64_t num_rows, int64_t hidden_size, const Launch& launch);
constexpr int64_t kPartBytes = 8;

void rms_norm_backward(const RmsNormBackwardParams& params, const Launch& launch);
void layer_norm_backward(const LayerNormBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
