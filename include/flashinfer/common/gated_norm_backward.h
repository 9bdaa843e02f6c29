// Gradients of RMSNorm with a gate: parameters that the binding and the kernels of every backend share.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// With grad = dL/dy, and s, u and r as in common/gated_norm.h:
//   norm_before_gate, h = grad s weight: dx = h r - x r^3 mean(h x), dgate = grad x r weight act'(gate),
//     dweight = sum over rows of grad x r s
//   else, h = grad weight, du = h r - u r^3 mean(h u): dx = du s, dgate = du x act'(gate),
//     dweight = sum over rows of grad u r
struct GatedRmsNormBackwardParams {
  const void* grad;
  const void* input;
  const void* gate;
  const void* weight;
  void* grad_input;  // contiguous, as the next two
  void* grad_gate;
  void* grad_weight;
  void* parts;  // num_parts rows of sums of the weight, at most kGatedSumBytes each, added in order
  Rows grad_rows, input_rows, gate_rows;
  int64_t num_rows, num_parts, num_groups, group_size;
  Scalar eps;
  bool sigmoid, norm_before_gate;
  DType dtype;
};

struct Launch;

// Return the number of parts of the rows.
int64_t gated_norm_backward_parts(int64_t num_rows, int64_t num_groups, int64_t group_size, const Launch& launch);
constexpr int64_t kGatedSumBytes = 8;

void gated_rms_norm_backward(const GatedRmsNormBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
