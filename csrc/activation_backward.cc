// Operator of one activation function's gradient.
#include "binding/binding.h"

#include <flashinfer/common/activation_backward.h>

#include "activation_backward_config.h"

namespace flashinfer::binding {
namespace {

Tensor act_and_mul_backward_new(const Tensor& grad, const Tensor& input) {
  const Check check(ACTIVATION_OP "_backward");
  const View g(grad, "grad"), x(input, "input");
  check.rank(x, 1, 16);
  check.trainable(x);
  if (x.size(-1) % 2 != 0)
    check.fail(x, "got a last dimension of " + std::to_string(x.size(-1)) + ", wanted an even one");
  int64_t half[16];
  for (int64_t i = 0; i < x.ndim; ++i) half[i] = x.sizes[i];
  half[x.ndim - 1] /= 2;
  View expected = x;
  expected.sizes = half, expected.name = "the result";
  check.same_shape(g, expected);
  check.same_dtype(g, x);
  check.same_device(g, x);
  for (const View* arg : {&g, &x}) check.last_contiguous(*arg), check.aligned(*arg);
  Tensor grad_input = empty_like(x, input);
  const ActAndMulBackwardParams params{.grad = g.data,
                                       .input = x.data,
                                       .grad_input = View(grad_input, "grad_input").data,
                                       .grad_rows = check.rows(g),
                                       .input_rows = check.rows(x),
                                       .num_rows = g.numel ? g.numel / g.size(-1) : 0,
                                       .out_size = g.size(-1),
                                       .dtype = x.dtype};
  act_and_mul_backward(params, OnDevice(x));
  return grad_input;
}

FLASHINFER_LIBRARY(m) { m.impl(ACTIVATION_OP "_backward", box<act_and_mul_backward_new>); }

}  // namespace
}  // namespace flashinfer::binding
