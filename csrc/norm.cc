// Operators of the norm family.
#include "binding/binding.h"
#include "norm/inputs.h"

#include <flashinfer/common/norm.h>

#include <tuple>

namespace flashinfer::binding {
namespace {

// kGemma adds 1 to the weight. With `residual`, write the normalised sum to `out` and the sum itself to
// `residual`.
template <bool kGemma>
void normalize(const Check& check, const Tensor& out, const Tensor& input, const Tensor* residual, const Tensor& weight,
               double eps, const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  const RmsNormArguments<false> args(check, out, input, residual, weight);
  const RmsNormParams params{args.tensors(check, eps, eps_tensor), kGemma ? 1.0f : 0.0f, args.x.dtype};
  rms_norm(params, OnDevice(args.x, enable_pdl));
}

template <bool kGemma>
void rmsnorm_into(const Tensor& out, const Tensor& input, const Tensor& weight, double eps,
                  const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  normalize<kGemma>(Check(kGemma ? "gemma_rmsnorm" : "rmsnorm"), out, input, nullptr, weight, eps, eps_tensor,
                    enable_pdl);
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

template <bool kGemma>
void fused_add_rmsnorm_into(const Tensor& out, const Tensor& input, const Tensor& residual, const Tensor& weight,
                            double eps, const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  normalize<kGemma>(Check(kGemma ? "gemma_fused_add_rmsnorm" : "fused_add_rmsnorm"), out, input, &residual, weight, eps,
                    eps_tensor, enable_pdl);
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
  const LayerNormArguments<false> args(check, out, input, gemma, beta);
  const LayerNormParams params{args.tensors(check, eps, eps_tensor), args.x.dtype, args.affine_is_float32()};
  layer_norm(params, OnDevice(args.x));
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
