// Gradients of RMSNorm with a gate on the CPU. A thread takes a part of the rows.
// common/gated_norm_backward.h has the equations.
#pragma once

#include <array>
#include <cmath>

#include <flashinfer/common/gated_norm_backward.h>
#include <flashinfer/cpu/gated_norm.h>
#include <flashinfer/cpu/norm_backward.h>
#include <flashinfer/cpu/simd/lanes.h>

namespace flashinfer::cpu {

template <typename T, template <typename> class Act>
void gated_rms_norm_backward_of(const GatedRmsNormBackwardParams& p) {
  using L = Lanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  using Function = Act<GateMath<T>>;
  const int64_t n = p.group_size, hidden = n * p.num_groups;
  const bool before = p.norm_before_gate;
  const auto of_group = [&](int64_t row, int64_t start, S* sums) {
    const T* grad = static_cast<const T*>(p.grad) + p.grad_rows.offset(row) + start;
    const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row) + start;
    const T* gate = static_cast<const T*>(p.gate) + p.gate_rows.offset(row) + start;
    const T* weight = static_cast<const T*>(p.weight) + start;
    T* grad_input = static_cast<T*>(p.grad_input) + row * hidden + start;
    T* grad_gate = static_cast<T*>(p.grad_gate) + row * hidden + start;
    const auto [squares, products] = row_sums<L, 2>(n, [&](int64_t i, int count, std::array<V, 2>& totals) {
      const V x = L::load(in + i, count), z = L::load(gate + i, count);
      const V h = L::load(grad + i, count) * L::load(weight + i, count), u = Function::apply(z, x);
      totals[0] += before ? x * x : u * u;
      totals[1] += h * u;
    });
    const double size = static_cast<double>(n), root = 1 / std::sqrt(squares / size + p.eps.get());
    const S r = static_cast<S>(root), c = static_cast<S>(products / size * root * root * root);
    for_lanes_of<L>(n, [&](int64_t i, int count) {
      const V x = L::load(in + i, count), z = L::load(gate + i, count), g = L::load(grad + i, count);
      const V h = g * L::load(weight + i, count), u = Function::apply(z, x);
      V dx, dz;
      if (before) {
        dx = Function::apply(z, h) * r - x * c;
        dz = Function::slope(z, h * x * r);
      } else {
        const V du = h * r - u * c;
        dx = Function::apply(z, du);
        dz = Function::slope(z, du * x);
      }
      L::store(grad_input + i, dx, count);
      L::store(grad_gate + i, dz, count);
      S* sum = sums + start + i;
      L::store_wide(sum, L::load_wide(sum, count) + g * u * r, count);
    });
  };
  for_rows_of_parts<S>(p.parts, p.num_parts, p.num_rows, hidden, [&](int64_t row, S* sums) {
    for (int64_t start = 0; start < hidden; start += n) of_group(row, start, sums);
  });
  sum_parts<S>(p.parts, p.num_parts, hidden, 0, hidden, static_cast<T*>(p.grad_weight));
}

template <typename T>
void gated_rms_norm_backward(const GatedRmsNormBackwardParams& p) {
  p.sigmoid ? gated_rms_norm_backward_of<T, Sigmoid>(p) : gated_rms_norm_backward_of<T, Silu>(p);
}

}  // namespace flashinfer::cpu
