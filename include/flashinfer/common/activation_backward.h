// Gradients of the activation family: parameters of its kernels. The slopes stand next to the functions.
#pragma once

#include <flashinfer/common/activation.h>

namespace flashinfer {

// grad_input = (grad * input[..., n:] * act'(input[..., :n]), grad * act(input[..., :n])), contiguous.
struct ActAndMulBackwardParams {
  const void* grad;
  const void* input;
  void* grad_input;
  Rows grad_rows, input_rows;
  int64_t num_rows;
  int64_t out_size;
  DType dtype;
};

struct Launch;
void act_and_mul_backward(const ActAndMulBackwardParams& params, const Launch& launch);

}  // namespace flashinfer
