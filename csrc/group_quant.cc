// Operator of the group_quant family.
#include "binding/binding.h"

#include <flashinfer/common/group_quant.h>

#include <cmath>

namespace flashinfer::binding {
namespace {

void per_token_group_quant_8bit(const Tensor& x_, const Tensor& q_, const Tensor& scale_, int64_t group_size,
                                double eps, bool power_of_two) {
  const Check check("per_token_group_quant_8bit");
  const View x(x_, "x"), q(q_, "q"), scale(scale_, "scale");
  check.rank(x, 2, 2);
  check.floating(x);
  const int64_t rows = x.size(0), n = x.size(1);
  if (group_size < 1 || n % group_size != 0)
    check.fail("group_size",
               "got " + std::to_string(group_size) + ", wanted a divisor of x's last dimension, " + std::to_string(n));
  if (!(eps > 0) || !std::isfinite(eps) || static_cast<float>(eps / 448) < 0x1p-126f)
    check.fail("eps", "got " + std::to_string(eps) + ", wanted a positive number, at least 1e-35");
  check.dtype(q, {DType::kFloat8E4M3, DType::kInt8});
  check.same_shape(q, x);
  check.dtype(scale, {DType::kFloat32});
  check.shape(scale, {rows, n / group_size});
  for (const View* arg : {&x, &q}) check.last_contiguous(*arg), check.aligned(*arg);
  for (const View* arg : {&q, &scale})
    check.same_device(*arg, x), check.writable(*arg), check.no_overlap(*arg, x, false);
  check.no_overlap(q, scale, false);
  const auto stride = [](const View& arg, int64_t dim) { return arg.size(dim) > 1 ? arg.stride(dim) : 0; };
  const GroupQuantParams params{.input = x.data,
                                .output = q.data,
                                .scale = static_cast<float*>(scale.data),
                                .input_stride = stride(x, 0),
                                .output_stride = stride(q, 0),
                                .scale_row_stride = stride(scale, 0),
                                .scale_group_stride = stride(scale, 1),
                                .num_rows = rows,
                                .num_groups = n / group_size,
                                .group_size = group_size,
                                .eps = static_cast<float>(eps),
                                .power_of_two = power_of_two,
                                .dtype = x.dtype,
                                .output_dtype = q.dtype};
  if (x.numel) group_quant(params, OnDevice(x));
}

FLASHINFER_LIBRARY(m) { m.impl("per_token_group_quant_8bit", box<per_token_group_quant_8bit>); }

}  // namespace
}  // namespace flashinfer::binding
