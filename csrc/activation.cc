// Operators of one activation module: ACTIVATION_OP, and its form with `out`.
#include "binding/binding.h"

#include <flashinfer/common/activation.h>

#include "activation_config.h"

namespace flashinfer::binding {
namespace {

// Return the first or second half of the last dimension as a view.
struct Half {
  int64_t sizes[16] = {};
  View view;

  Half(const View& whole, int64_t which) : view(whole) {
    for (int64_t i = 0; i < whole.ndim; ++i) sizes[i] = whole.sizes[i];
    sizes[whole.ndim - 1] /= 2;
    view.sizes = sizes, view.numel /= 2;
    view.data = static_cast<char*>(whole.data) + which * sizes[whole.ndim - 1] * size_of(whole.dtype);
  }
  Half(const Half&) = delete;
};

View checked_input(const Check& check, const Tensor& input) {
  const View x(input, "input");
  check.rank(x, 1, 16);
  check.trainable(x);
  if (x.size(-1) % 2 != 0)
    check.fail(x, "got a last dimension of " + std::to_string(x.size(-1)) + ", wanted an even one");
  return x;
}

void act_and_mul_out(const Tensor& out, const Tensor& input, std::optional<bool> enable_pdl) {
  const Check check(ACTIVATION_OP);
  const View x = checked_input(check, input), y(out, "out");
  const Half gate(x, 0), factor(x, 1);
  check.same_dtype(y, x);
  check.same_device(y, x);
  check.same_shape(y, gate.view);
  check.last_contiguous(x);
  check.last_contiguous(y);
  check.aligned(x);
  check.writable(y);
  check.no_overlap(y, gate.view, true);
  check.no_overlap(y, factor.view, false);
  const ActAndMulParams params{.input = x.data,
                               .output = y.data,
                               .input_rows = check.rows(x),
                               .output_rows = check.rows(y),
                               .num_rows = y.numel ? y.numel / y.size(-1) : 0,
                               .out_size = y.size(-1),
                               .dtype = x.dtype};
  act_and_mul(params, OnDevice(x, enable_pdl));
}

Tensor act_and_mul_new(const Tensor& input, std::optional<bool> enable_pdl) {
  const View x = checked_input(Check(ACTIVATION_OP), input);
  const Half gate(x, 0);
  Tensor out = empty_like(gate.view, input);
  act_and_mul_out(out, input, enable_pdl);
  return out;
}

FLASHINFER_LIBRARY(m) {
  m.impl(ACTIVATION_OP, box<act_and_mul_new>);
  m.impl(ACTIVATION_OP "_out", box<act_and_mul_out>);
  m.impl(ACTIVATION_OP "_autograd", box<act_and_mul_new>);
}

}  // namespace
}  // namespace flashinfer::binding
