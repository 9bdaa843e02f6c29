// Operators of the norm_quant family.
#include "binding/binding.h"
#include "binding/quant_scale.h"
#include "norm/inputs.h"

#include <flashinfer/common/norm_quant.h>

namespace flashinfer::binding {
namespace {

void normalize(const Check& check, const Tensor& out, const Tensor& input, const Tensor* residual, const Tensor& weight,
               double scale, const std::optional<Tensor>& scale_tensor, double eps,
               const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  const RmsNormArguments<true> args(check, out, input, residual, weight);
  const RmsNormQuantParams params{args.tensors(check, eps, eps_tensor),
                                  quant_scale(check, scale, scale_tensor, "scale", args.x), args.x.dtype, args.y.dtype};
  rms_norm_quant(params, OnDevice(args.x, enable_pdl));
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

void layernorm_quant(const Tensor& out, const Tensor& input, const Tensor& gemma, const Tensor& beta, double scale,
                     const std::optional<Tensor>& scale_tensor, double eps, const std::optional<Tensor>& eps_tensor) {
  const Check check("layernorm_quant");
  const LayerNormArguments<true> args(check, out, input, gemma, beta);
  const LayerNormQuantParams params{args.tensors(check, eps, eps_tensor),
                                    quant_scale(check, scale, scale_tensor, "scale", args.x), args.x.dtype,
                                    args.y.dtype, args.affine_is_float32()};
  layer_norm_quant(params, OnDevice(args.x));
}

void fused_add_rmsnorm_fp8_block_quant(const Tensor& out, const Tensor& block_scale, const Tensor& normed_out,
                                       const Tensor& input, const Tensor& residual, const Tensor& weight, double eps,
                                       const std::optional<Tensor>& eps_tensor, std::optional<bool> enable_pdl) {
  const Check check("fused_add_rmsnorm_fp8_block_quant");
  const View y(out, "out"), s(block_scale, "block_scale"), normed(normed_out, "normed_out"), x(input, "input");
  const View r(residual, "residual"), w(weight, "weight");
  check.rank(x, 2, 2);
  check.floating(x);
  const int64_t rows = x.size(0), n = x.size(1);
  if (n % kQuantBlock != 0)
    check.fail(x, "got a last dimension of " + std::to_string(n) + ", wanted a multiple of 128");
  check.dtype(y, {DType::kFloat8E4M3});
  check.dtype(s, {DType::kFloat32});
  check.shape(s, {n / kQuantBlock, -1});
  if (s.size(1) < rows)
    check.fail(s, "got " + std::to_string(s.size(1)) + " columns, wanted at least the " + std::to_string(rows) +
                      " rows of input");
  check.shape(w, {n});
  for (const View* arg : {&y, &normed, &r}) check.same_shape(*arg, x);
  for (const View* arg : {&normed, &r, &w}) check.same_dtype(*arg, x);
  for (const View* arg : {&y, &s, &normed, &r, &w}) check.same_device(*arg, x);
  for (const View* arg : {&y, &normed, &x, &r, &w}) check.last_contiguous(*arg), check.aligned(*arg);
  const View* written[] = {&y, &s, &normed, &r};
  for (const View* one : written) {
    check.writable(*one);
    check.no_overlap(*one, w, false);
    check.no_overlap(*one, x, one == &normed);
    for (const View* other : written)
      if (one < other) check.no_overlap(*one, *other, false);
  }
  const auto stride = [](const View& arg) { return arg.size(0) > 1 ? arg.stride(0) : 0; };
  const RmsNormBlockQuantParams params{.input = x.data,
                                       .residual = r.data,
                                       .weight = w.data,
                                       .normed = normed.data,
                                       .output = y.data,
                                       .scale = static_cast<float*>(s.data),
                                       .input_stride = stride(x),
                                       .residual_stride = stride(r),
                                       .normed_stride = stride(normed),
                                       .output_stride = stride(y),
                                       .scale_block_stride = stride(s),
                                       .scale_row_stride = s.size(1) > 1 ? s.stride(1) : 0,
                                       .num_rows = n ? rows : 0,
                                       .hidden_size = n,
                                       .eps = check.scalar(eps, eps_tensor, "eps_tensor", x),
                                       .dtype = x.dtype};
  if (params.num_rows) rms_norm_block_quant(params, OnDevice(x, enable_pdl));
}

FLASHINFER_LIBRARY(m) {
  m.impl("layernorm_quant", box<layernorm_quant>);
  m.impl("fused_add_rmsnorm_fp8_block_quant", box<fused_add_rmsnorm_fp8_block_quant>);
  m.impl("rmsnorm_quant", box<rmsnorm_quant>);
  m.impl("fused_add_rmsnorm_quant", box<fused_add_rmsnorm_quant>);
}

}  // namespace
}  // namespace flashinfer::binding
