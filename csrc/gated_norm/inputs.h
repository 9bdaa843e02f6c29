// Checks that the operators of the gated norm share.
#pragma once

#include "binding/binding.h"

#include <flashinfer/common/gated_norm.h>

#include <string>

namespace flashinfer::binding {

struct GatedNormArguments {
  View x, z, w;
  int64_t num_rows, num_groups, group_size;

  GatedNormArguments(const Check& check, const Tensor& input, const Tensor& gate, const Tensor& weight,
                     int64_t group_size_)
      : x(input, "input"), z(gate, "gate"), w(weight, "weight") {
    check.rank(x, 1, 16);
    check.trainable(x);
    check.same_shape(z, x);
    check.shape(w, {x.size(-1)});
    for (const View* arg : {&z, &w}) check.same_dtype(*arg, x), check.same_device(*arg, x);
    for (const View* arg : {&x, &z, &w}) check.last_contiguous(*arg), check.aligned(*arg);
    const int64_t hidden = x.size(-1);
    group_size = group_size_ == 0 ? hidden : group_size_;
    if (group_size < 0 || (hidden > 0 && hidden % group_size != 0))
      check.fail("group_size", "got " + std::to_string(group_size) + ", wanted a divisor of the last dimension's " +
                                   std::to_string(hidden));
    num_groups = hidden > 0 ? hidden / group_size : 0;
    num_rows = x.numel > 0 ? x.numel / hidden : 0;
  }
};

}  // namespace flashinfer::binding
