// Operators of the gradients of norms.
#include "binding/binding.h"

#include <flashinfer/common/norm_backward.h>

#include <tuple>

namespace flashinfer::binding {
namespace {

// Arguments that every gradient of a norm has.
struct Norm {
  const Check& check;
  View grad, x, w;
  int64_t num_rows;

  Norm(const Check& check_, const Tensor& grad_, const Tensor& input, const Tensor& weight, const char* weight_name)
      : check(check_), grad(grad_, "grad"), x(input, "input"), w(weight, weight_name) {
    check.rank(x, 1, 16);
    check.trainable(x);
    check.same_shape(grad, x);
    check.same_dtype(grad, x);
    check.shape(w, {x.size(-1)});
    for (const View* arg : {&grad, &w}) check.same_device(*arg, x);
    for (const View* arg : {&grad, &x, &w}) check.last_contiguous(*arg), check.aligned(*arg);
    num_rows = x.numel ? x.numel / x.size(-1) : 0;
  }
};

std::tuple<Tensor, Tensor> rmsnorm_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                            const std::optional<Tensor>& grad_sum, double eps,
                                            const std::optional<Tensor>& eps_tensor, double weight_offset) {
  const Check check("rmsnorm_backward");
  const Norm norm(check, grad, input, weight, "weight");
  const View& x = norm.x;
  const View more = grad_sum ? View(*grad_sum, "grad_sum") : x;
  check.same_dtype(norm.w, x);
  check.same_dtype(more, x);
  check.same_shape(more, x);
  check.same_device(more, x);
  check.last_contiguous(more);
  check.aligned(more);
  const OnDevice where(x);
  Tensor grad_input = empty_like(x, input), grad_weight = empty_like(norm.w, weight);
  const int64_t parts = norm_backward_parts(norm.num_rows, x.size(-1), where);
  const Tensor sums = empty_bytes(parts * x.size(-1) * kPartBytes, input);
  const RmsNormBackwardParams params{.grad = norm.grad.data,
                                     .input = x.data,
                                     .weight = norm.w.data,
                                     .grad_sum = grad_sum ? more.data : nullptr,
                                     .grad_input = View(grad_input, "grad_input").data,
                                     .grad_weight = View(grad_weight, "grad_weight").data,
                                     .parts = View(sums, "sums").data,
                                     .grad_rows = check.rows(norm.grad),
                                     .input_rows = check.rows(x),
                                     .grad_sum_rows = check.rows(more),
                                     .num_rows = norm.num_rows,
                                     .num_parts = parts,
                                     .hidden_size = x.size(-1),
                                     .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                                     .weight_offset = static_cast<float>(weight_offset),
                                     .dtype = x.dtype};
  rms_norm_backward(params, where);
  return {std::move(grad_input), std::move(grad_weight)};
}

std::tuple<Tensor, Tensor, Tensor> layernorm_backward(const Tensor& grad, const Tensor& input, const Tensor& gemma,
                                                      double eps, const std::optional<Tensor>& eps_tensor) {
  const Check check("layernorm_backward");
  const Norm norm(check, grad, input, gemma, "gemma");
  const View& x = norm.x;
  check.dtype(norm.w, {DType::kFloat32, x.dtype});
  const OnDevice where(x);
  Tensor grad_input = empty_like(x, input), grad_gamma = empty_like(norm.w, gemma),
         grad_beta = empty_like(norm.w, gemma);
  const int64_t parts = norm_backward_parts(norm.num_rows, x.size(-1), where);
  const Tensor sums = empty_bytes(2 * parts * x.size(-1) * kPartBytes, input);
  const LayerNormBackwardParams params{.grad = norm.grad.data,
                                       .input = x.data,
                                       .gamma = norm.w.data,
                                       .grad_input = View(grad_input, "grad_input").data,
                                       .grad_gamma = View(grad_gamma, "grad_gamma").data,
                                       .grad_beta = View(grad_beta, "grad_beta").data,
                                       .parts = View(sums, "sums").data,
                                       .grad_rows = check.rows(norm.grad),
                                       .input_rows = check.rows(x),
                                       .num_rows = norm.num_rows,
                                       .num_parts = parts,
                                       .hidden_size = x.size(-1),
                                       .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                                       .dtype = x.dtype,
                                       .affine_is_float32 = norm.w.dtype == DType::kFloat32};
  layer_norm_backward(params, where);
  return {std::move(grad_input), std::move(grad_gamma), std::move(grad_beta)};
}

FLASHINFER_LIBRARY(m) {
  m.impl("rmsnorm_backward", box<rmsnorm_backward>);
  m.impl("layernorm_backward", box<layernorm_backward>);
}

}  // namespace
}  // namespace flashinfer::binding
