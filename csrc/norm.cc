// Operators of the norm family.
#include "binding/binding.h"

#include <flashinfer/common/norm.h>

#include <tuple>

namespace flashinfer::binding {
namespace {

// kGemma adds 1 to the weight.
template <bool kGemma>
void rmsnorm_into(const Tensor& out, const Tensor& input, const Tensor& weight, double eps,
                  const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  const Check check(kGemma ? "gemma_rmsnorm" : "rmsnorm");
  const View x(input, "input"), w(weight, "weight"), y(out, "out");
  check.rank(x, 1, 16);
  check.trainable(x);
  check.shape(w, {x.size(-1)});
  check.same_shape(y, x);
  for (const View* arg : {&w, &y}) {
    check.same_dtype(*arg, x);
    check.same_device(*arg, x);
  }
  for (const View* arg : {&x, &w, &y}) check.last_contiguous(*arg), check.aligned(*arg);
  check.writable(y);
  check.no_overlap(y, x, true);
  check.no_overlap(y, w, false);
  const RmsNormParams params{.input = x.data,
                             .residual = nullptr,
                             .weight = w.data,
                             .output = y.data,
                             .input_rows = check.rows(x),
                             .residual_rows = {},
                             .output_rows = check.rows(y),
                             .num_rows = x.numel ? x.numel / x.size(-1) : 0,
                             .hidden_size = x.size(-1),
                             .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                             .weight_offset = kGemma ? 1.0f : 0.0f,
                             .dtype = x.dtype};
  rms_norm(params, OnDevice(x, enable_pdl));
}

template <bool kGemma>
void rmsnorm_out(const Tensor& out, const Tensor& input, const Tensor& weight, double eps,
                 std::optional<bool> enable_pdl) {
  rmsnorm_into<kGemma>(out, input, weight, eps, std::nullopt, enable_pdl);
}

template <bool kGemma>
Tensor rmsnorm_autograd(const Tensor& input, const Tensor& weight, double eps, const std::optional<Tensor>& eps_tensor,
                        std::optional<bool> enable_pdl) {
  Tensor out = empty_like(View(input, "input"), input);
  rmsnorm_into<kGemma>(out, input, weight, eps, eps_tensor, enable_pdl);
  return out;
}

template <bool kGemma>
Tensor rmsnorm(const Tensor& input, const Tensor& weight, double eps, std::optional<bool> enable_pdl) {
  return rmsnorm_autograd<kGemma>(input, weight, eps, std::nullopt, enable_pdl);
}

// Write the normalised sum to `out` and the sum itself to `residual`.
template <bool kGemma>
void fused_add_rmsnorm_into(const Tensor& out, const Tensor& input, const Tensor& residual, const Tensor& weight,
                            double eps, const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  const Check check(kGemma ? "gemma_fused_add_rmsnorm" : "fused_add_rmsnorm");
  const View x(input, "input"), r(residual, "residual"), w(weight, "weight");
  const View y = &out == &input ? x : View(out, "out");
  check.rank(x, 1, 16);
  check.trainable(x);
  check.shape(w, {x.size(-1)});
  check.same_shape(r, x);
  for (const View* arg : {&r, &w}) {
    check.same_dtype(*arg, x);
    check.same_device(*arg, x);
  }
  for (const View* arg : {&x, &r, &w}) check.last_contiguous(*arg), check.aligned(*arg);
  for (const View* arg : {&y, &r}) {
    check.writable(*arg);
    check.no_overlap(*arg, w, false);
  }
  check.no_overlap(x, r, false);
  const RmsNormParams params{.input = x.data,
                             .residual = r.data,
                             .weight = w.data,
                             .output = y.data,
                             .input_rows = check.rows(x),
                             .residual_rows = check.rows(r),
                             .output_rows = check.rows(y),
                             .num_rows = x.numel ? x.numel / x.size(-1) : 0,
                             .hidden_size = x.size(-1),
                             .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                             .weight_offset = kGemma ? 1.0f : 0.0f,
                             .dtype = x.dtype};
  rms_norm(params, OnDevice(x, enable_pdl));
}

template <bool kGemma>
void fused_add_rmsnorm(const Tensor& input, const Tensor& residual, const Tensor& weight, double eps,
                       std::optional<bool> enable_pdl) {
  fused_add_rmsnorm_into<kGemma>(input, input, residual, weight, eps, std::nullopt, enable_pdl);
}

template <bool kGemma>
std::tuple<Tensor, Tensor> fused_add_rmsnorm_autograd(const Tensor& input, const Tensor& residual, const Tensor& weight,
                                                      double eps, const std::optional<Tensor>& eps_tensor,
                                                      std::optional<bool> enable_pdl) {
  Tensor out = empty_like(View(input, "input"), input), total = empty_like(View(residual, "residual"), residual);
  require(aoti_torch_copy_(total.get(), residual.get(), false), "a copy of the residual");
  fused_add_rmsnorm_into<kGemma>(out, input, total, weight, eps, eps_tensor, enable_pdl);
  return {std::move(out), std::move(total)};
}

void layernorm_into(const Tensor& out, const Tensor& input, const Tensor& gemma, const Tensor& beta, double eps,
                    const std::optional<Tensor>& eps_tensor) {
  const Check check("layernorm");
  const View x(input, "input"), g(gemma, "gemma"), b(beta, "beta"), y(out, "out");
  check.rank(x, 1, 16);
  check.trainable(x);
  check.dtype(g, {DType::kFloat32, x.dtype});
  check.same_dtype(b, g);
  check.same_dtype(y, x);
  check.same_shape(y, x);
  for (const View* arg : {&g, &b}) {
    check.shape(*arg, {x.size(-1)});
    check.no_overlap(y, *arg, false);
  }
  for (const View* arg : {&g, &b, &y}) check.same_device(*arg, x);
  for (const View* arg : {&x, &g, &b, &y}) check.last_contiguous(*arg), check.aligned(*arg);
  check.writable(y);
  check.no_overlap(y, x, true);
  const LayerNormParams params{.input = x.data,
                               .gamma = g.data,
                               .beta = b.data,
                               .output = y.data,
                               .input_rows = check.rows(x),
                               .output_rows = check.rows(y),
                               .num_rows = x.numel ? x.numel / x.size(-1) : 0,
                               .hidden_size = x.size(-1),
                               .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                               .dtype = x.dtype,
                               .affine_is_float32 = g.dtype == DType::kFloat32};
  layer_norm(params, OnDevice(x));
}

void layernorm_out(const Tensor& out, const Tensor& input, const Tensor& gemma, const Tensor& beta, double eps) {
  layernorm_into(out, input, gemma, beta, eps, std::nullopt);
}

Tensor layernorm_autograd(const Tensor& input, const Tensor& gemma, const Tensor& beta, double eps,
                          const std::optional<Tensor>& eps_tensor) {
  Tensor out = empty_like(View(input, "input"), input);
  layernorm_into(out, input, gemma, beta, eps, eps_tensor);
  return out;
}

Tensor layernorm(const Tensor& input, const Tensor& gemma, const Tensor& beta, double eps) {
  return layernorm_autograd(input, gemma, beta, eps, std::nullopt);
}

FLASHINFER_LIBRARY(m) {
  m.impl("rmsnorm", box<rmsnorm<false>>);
  m.impl("rmsnorm_autograd", box<rmsnorm_autograd<false>>);
  m.impl("rmsnorm_out", box<rmsnorm_out<false>>);
  m.impl("gemma_rmsnorm", box<rmsnorm<true>>);
  m.impl("gemma_rmsnorm_autograd", box<rmsnorm_autograd<true>>);
  m.impl("gemma_rmsnorm_out", box<rmsnorm_out<true>>);
  m.impl("fused_add_rmsnorm", box<fused_add_rmsnorm<false>>);
  m.impl("fused_add_rmsnorm_autograd", box<fused_add_rmsnorm_autograd<false>>);
  m.impl("gemma_fused_add_rmsnorm", box<fused_add_rmsnorm<true>>);
  m.impl("gemma_fused_add_rmsnorm_autograd", box<fused_add_rmsnorm_autograd<true>>);
  m.impl("layernorm", box<layernorm>);
  m.impl("layernorm_autograd", box<layernorm_autograd>);
  m.impl("layernorm_out", box<layernorm_out>);
}

}  // namespace
}  // namespace flashinfer::binding
