// Checks that the norms share, with results of the input's type (kQuantised = false) or of 8 bits.
#pragma once

#include "binding/binding.h"

#include <flashinfer/common/norm.h>

namespace flashinfer::binding {

template <bool kQuantised>
void check_elements(const Check& check, const View& x, const View& y) {
  check.rank(x, 1, 16);
  if constexpr (kQuantised) {
    check.floating(x);
    check.dtype(y, {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8});
  } else {
    check.trainable(x);
    check.same_dtype(y, x);
  }
}

template <bool kQuantised>
struct RmsNormArguments {
  View x, w, y, r;  // r is x without a residual
  bool has_residual;
  int64_t num_rows;

  RmsNormArguments(const Check& check, const Tensor& out, const Tensor& input, const Tensor* residual,
                   const Tensor& weight)
      : x(input, "input"),
        w(weight, "weight"),
        y(&out == &input ? x : View(out, "out")),
        r(residual ? View(*residual, "residual") : x),
        has_residual(residual != nullptr) {
    check_elements<kQuantised>(check, x, y);
    check.shape(w, {x.size(-1)});
    check.same_shape(y, x);
    check.same_dtype(w, x);
    for (const View* arg : {&w, &y}) check.same_device(*arg, x);
    for (const View* arg : {&x, &w, &y}) check.last_contiguous(*arg), check.aligned(*arg);
    check.writable(y);
    check.no_overlap(y, x, !kQuantised);
    check.no_overlap(y, w, false);
    if (residual) {
      check.same_shape(r, x);
      check.same_dtype(r, x);
      check.same_device(r, x);
      check.last_contiguous(r), check.aligned(r);
      check.writable(r);
      for (const View* arg : {&x, &y, &w}) check.no_overlap(*arg, r, false);
    }
    num_rows = x.numel ? x.numel / x.size(-1) : 0;
  }

  RmsNormTensors tensors(const Check& check, double eps, const std::optional<Tensor>& eps_tensor) const {
    return {.input = x.data,
            .residual = has_residual ? r.data : nullptr,
            .weight = w.data,
            .output = y.data,
            .input_rows = check.rows(x),
            .residual_rows = has_residual ? check.rows(r) : Rows{},
            .output_rows = check.rows(y),
            .num_rows = num_rows,
            .hidden_size = x.size(-1),
            .eps = check.scalar(eps, eps_tensor, "eps_tensor", x)};
  }
};

template <bool kQuantised>
struct LayerNormArguments {
  View x, g, b, y;
  int64_t num_rows;

  LayerNormArguments(const Check& check, const Tensor& out, const Tensor& input, const Tensor& gemma,
                     const Tensor& beta)
      : x(input, "input"), g(gemma, "gemma"), b(beta, "beta"), y(out, "out") {
    check_elements<kQuantised>(check, x, y);
    check.dtype(g, {DType::kFloat32, x.dtype});
    check.same_dtype(b, g);
    check.same_shape(y, x);
    for (const View* arg : {&g, &b}) {
      check.shape(*arg, {x.size(-1)});
      check.no_overlap(y, *arg, false);
    }
    for (const View* arg : {&g, &b, &y}) check.same_device(*arg, x);
    for (const View* arg : {&x, &g, &b, &y}) check.last_contiguous(*arg), check.aligned(*arg);
    check.writable(y);
    check.no_overlap(y, x, !kQuantised);
    num_rows = x.numel ? x.numel / x.size(-1) : 0;
  }

  LayerNormTensors tensors(const Check& check, double eps, const std::optional<Tensor>& eps_tensor) const {
    return {.input = x.data,
            .gamma = g.data,
            .beta = b.data,
            .output = y.data,
            .input_rows = check.rows(x),
            .output_rows = check.rows(y),
            .num_rows = num_rows,
            .hidden_size = x.size(-1),
            .eps = check.scalar(eps, eps_tensor, "eps_tensor", x)};
  }
  bool affine_is_float32() const { return g.dtype == DType::kFloat32; }
};

}  // namespace flashinfer::binding
