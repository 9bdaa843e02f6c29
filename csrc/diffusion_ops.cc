// Operator of the diffusion_ops family.
#include "binding/binding.h"

#include <flashinfer/common/diffusion_ops.h>

#include <cmath>

namespace flashinfer::binding {
namespace {

void fused_qk_rmsnorm_rope(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, const Tensor& q_out,
                           const Tensor& k_out, const Tensor& v_out, int64_t ppf, int64_t pph, int64_t ppw,
                           int64_t num_frame_channels, int64_t num_height_channels, int64_t num_width_channels,
                           double eps, double base, bool interleave, bool is_qk_norm, double output_quant_scale,
                           double v_quant_scale) {
  const Check check("fused_qk_rmsnorm_rope");
  const View x(qkv, "qkv"), weights[] = {View(q_weight, "q_weight"), View(k_weight, "k_weight")};
  const View outputs[] = {View(q_out, "q_out"), View(k_out, "k_out"), View(v_out, "v_out")};
  check.rank(x, 2, 2);
  check.dtype(x, {DType::kBFloat16});
  check.last_contiguous(x), check.wide_rows(x);
  check.rank(outputs[0], 3, 3);
  const int64_t tokens = x.size(0), head_dim = outputs[0].size(2);
  const int64_t channels[] = {num_frame_channels, num_height_channels, num_width_channels};
  if (head_dim != 64 && head_dim != 128 && head_dim != 256)
    check.fail("head_dim", "got " + std::to_string(head_dim) + ", wanted 64, 128 or 256");
  for (int64_t one : channels)
    if (one < 0 || one % 2 != 0)
      check.fail("num_frame_channels", "got " + std::to_string(one) + " channels of an axis, wanted an even number");
  if (channels[0] + channels[1] + channels[2] != head_dim)
    check.fail("num_frame_channels", "got " + std::to_string(channels[0] + channels[1] + channels[2]) +
                                         " channels of all axes, wanted head_dim, " + std::to_string(head_dim));
  if (ppf < 1 || pph < 1 || ppw < 1 || tokens % (ppf * pph * ppw) != 0)
    check.fail(x, "got " + std::to_string(tokens) + " tokens, wanted a multiple of ppf * pph * ppw, positive numbers");
  check.that(std::isfinite(eps) && eps >= 0, "eps", "got a number below 0 or none, wanted a finite one");
  check.that(std::isfinite(base) && base > 0, "base", "got no positive number");
  check.that(std::isfinite(output_quant_scale) && output_quant_scale > 0, "output_quant_scale",
             "got no positive number");
  check.that(std::isfinite(v_quant_scale) && v_quant_scale > 0, "v_quant_scale", "got no positive number");
  QkNormRopeParams params{};
  int64_t heads = 0;
  for (int part = 0; part < 3; ++part) {
    const View& out = outputs[part];
    check.shape(out, {tokens, -1, head_dim});
    check.dtype(out, {DType::kBFloat16, DType::kFloat8E4M3});
    check.same_dtype(out, outputs[0]), check.same_device(out, x);
    if (out.size(1) < 1) check.fail(out, "got no head");
    if (out.stride(2) != 1 || (out.size(1) > 1 && out.stride(1) != head_dim))
      check.fail(out, "is not contiguous within a token");
    check.wide_rows(out), check.writable(out), check.no_overlap(out, x, false);
    for (int other = 0; other < part; ++other) check.no_overlap(out, outputs[other], false);
    params.outputs[part] = out.data, params.output_strides[part] = tokens > 1 ? out.stride(0) : 0;
    params.heads[part] = out.size(1), heads += out.size(1);
    params.scales[part] = static_cast<float>(part < 2 ? output_quant_scale : v_quant_scale);
    if (part == 2) break;
    check.shape(weights[part], {out.size(1) * head_dim});
    check.same_dtype(weights[part], x), check.same_device(weights[part], x);
    check.contiguous(weights[part]), check.wide_rows(weights[part]), check.no_overlap(out, weights[part], false);
    params.weights[part] = weights[part].data;
  }
  if (x.size(1) != heads * head_dim)
    check.fail(x, "got a last dimension of " + std::to_string(x.size(1)) + ", wanted all heads times head_dim, " +
                      std::to_string(heads * head_dim));
  params.input = x.data, params.input_stride = tokens > 1 ? x.stride(0) : 0;
  params.num_tokens = tokens, params.head_dim = head_dim;
  params.frames = ppf, params.height = pph, params.width = ppw;
  params.height_pair = static_cast<int32_t>(channels[0] / 2);
  params.width_pair = static_cast<int32_t>((channels[0] + channels[1]) / 2);
  for (int axis = 0, pair = 0; axis < 3; ++axis)
    for (int64_t i = 0; i < channels[axis] / 2; ++i, ++pair)
      params.frequencies[pair] =
          static_cast<float>(std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(channels[axis])));
  params.eps = static_cast<float>(eps);
  params.interleave = interleave, params.normalises = is_qk_norm;
  params.eight_bits = outputs[0].dtype != DType::kBFloat16;
  if (tokens) qk_norm_rope(params, OnDevice(x));
}

FLASHINFER_LIBRARY(m) { m.impl("fused_qk_rmsnorm_rope", box<fused_qk_rmsnorm_rope>); }

}  // namespace
}  // namespace flashinfer::binding
