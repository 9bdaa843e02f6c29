// Operators of the norm_quant family.
#include "binding/binding.h"

#include <flashinfer/common/norm_quant.h>

#include <cmath>

namespace flashinfer::binding {
namespace {

// Set the scale: a number, or the element of a tensor that the kernel reads.
void put_scale(const Check& check, double scale, const std::optional<Tensor>& tensor, const View& like,
               RmsNormQuantParams& params) {
  params.scale = {scale, nullptr};
  if (!tensor) return check.that(std::isfinite(scale) && scale > 0, "scale", "got no positive number");
  const View arg(*tensor, "scale");
  check.dtype(arg, {DType::kFloat32, DType::kFloat64});
  check.same_device(arg, like);
  if (arg.numel != 1) check.fail(arg, "got " + std::to_string(arg.numel) + " elements, wanted 1");
  if (arg.dtype == DType::kFloat32) params.scale_at = static_cast<const float*>(arg.data);
  if (arg.dtype == DType::kFloat64) params.scale.at = static_cast<const double*>(arg.data);
}

void normalize(const Check& check, const Tensor& out, const Tensor& input, const Tensor* residual, const Tensor& weight,
               double scale, const std::optional<Tensor>& scale_tensor, double eps,
               const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  const View x(input, "input"), w(weight, "weight"), y(out, "out");
  const View r = residual ? View(*residual, "residual") : x;
  check.rank(x, 1, 16);
  check.floating(x);
  check.shape(w, {x.size(-1)});
  check.dtype(y, {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8});
  for (const View* arg : {&r, &y}) check.same_shape(*arg, x);
  for (const View* arg : {&r, &w}) check.same_dtype(*arg, x);
  for (const View* arg : {&r, &w, &y}) check.same_device(*arg, x);
  for (const View* arg : {&x, &r, &w, &y}) check.last_contiguous(*arg), check.aligned(*arg);
  check.writable(y);
  for (const View* arg : {&x, &r, &w}) check.no_overlap(y, *arg, false);
  if (residual) {
    check.writable(r);
    check.no_overlap(x, r, false);
    check.no_overlap(r, w, false);
  }
  RmsNormQuantParams params{.input = x.data,
                            .residual = residual ? r.data : nullptr,
                            .weight = w.data,
                            .output = y.data,
                            .input_rows = check.rows(x),
                            .residual_rows = residual ? check.rows(r) : Rows{},
                            .output_rows = check.rows(y),
                            .num_rows = x.numel ? x.numel / x.size(-1) : 0,
                            .hidden_size = x.size(-1),
                            .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                            .scale = {},
                            .scale_at = nullptr,
                            .dtype = x.dtype,
                            .output_dtype = y.dtype};
  put_scale(check, scale, scale_tensor, x, params);
  rms_norm_quant(params, OnDevice(x, enable_pdl));
}

void rmsnorm_quant(const Tensor& out, const Tensor& input, const Tensor& weight, double scale,
                   const std::optional<Tensor>& scale_tensor, double eps, const std::optional<Tensor>& eps_tensor,
                   std::optional<bool> enable_pdl) {
  normalize(Check("rmsnorm_quant"), out, input, nullptr, weight, scale, scale_tensor, eps, eps_tensor, enable_pdl);
}

void fused_add_rmsnorm_quant(const Tensor& out, const Tensor& input, const Tensor& residual, const Tensor& weight,
                             double scale, const std::optional<Tensor>& scale_tensor, double eps,
                             const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  normalize(Check("fused_add_rmsnorm_quant"), out, input, &residual, weight, scale, scale_tensor, eps, eps_tensor,
            enable_pdl);
}

FLASHINFER_LIBRARY(m) {
  m.impl("rmsnorm_quant", box<rmsnorm_quant>);
  m.impl("fused_add_rmsnorm_quant", box<fused_add_rmsnorm_quant>);
}

}  // namespace
}  // namespace flashinfer::binding
