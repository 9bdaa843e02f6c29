// RMSNorm with a gate, as in Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): parameters that the binding and the
// kernels of every backend share.
#pragma once

#include <flashinfer/common/activation.h>
#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/common/scalar.h>

namespace flashinfer {

// With s = act(gate), for each group of `group_size` neighbours of a row:
//   norm_before_gate: y = x r weight s, r = 1 / sqrt(mean(x^2) + eps)
//   else:             y = u r weight with u = x s, r = 1 / sqrt(mean(u^2) + eps)
struct GatedRmsNormParams {
  const void* input;
  const void* gate;
  const void* weight;  // [num_groups * group_size]
  void* output;
  Rows input_rows, gate_rows, output_rows;
  int64_t num_rows, num_groups, group_size;
  Scalar eps;
  bool sigmoid;  // act is sigmoid, else silu
  bool norm_before_gate;
  DType dtype;
};

// 1 / (1 + e^-x), in the form of the activations in common/activation.h.
template <typename Math>
struct Sigmoid : ActivationBase<Math> {
  using Base = ActivationBase<Math>;
  using V = typename Math::V;
  using S = typename Math::S;

  static FLASHINFER_HD V apply(V x, V factor) {
    x = Base::within(x, 2.0 * Math::kMaxHalfExponent);
    const V root = Math::exp(Math::abs(x) * static_cast<S>(-0.5)), one = Base::constant(1.0);
    const V numerator = Math::select_less(x, V{}, root, one);
    // x - x is 0, or NaN if x is NaN
    return Math::divide(numerator, root * root + static_cast<S>(1)) * factor * numerator + (x - x);
  }

  static FLASHINFER_HD V slope(V x, V factor) {
    x = Base::within(x, 2.0 * Math::kMaxHalfExponent);
    const V root = Math::exp(Math::abs(x) * static_cast<S>(-0.5)), whole = root * root + static_cast<S>(1);
    return Math::divide(Math::divide(root, whole), whole) * factor * root + (x - x);
  }
};

struct Launch;
void gated_rms_norm(const GatedRmsNormParams& params, const Launch& launch);

}  // namespace flashinfer
