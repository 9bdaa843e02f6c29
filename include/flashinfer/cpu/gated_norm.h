// RMSNorm with a gate on the CPU. A thread takes a row at a time, and reads each group a second time from the
// L1 cache.
#pragma once

#include <array>
#include <cmath>
#include <type_traits>

#include <flashinfer/common/gated_norm.h>
#include <flashinfer/cpu/activation.h>
#include <flashinfer/cpu/norm_backward.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>

namespace flashinfer::cpu {

// float32 computes in double, half types in float. Gradients are checked in float64.
template <typename T>
using GateMath =
    std::conditional_t<std::is_same_v<T, double>, ExactMath, VectorMath<typename Lanes<T>::V, typename Lanes<T>::S>>;

template <typename T, template <typename> class Act>
void gated_rms_norm_of(const GatedRmsNormParams& p) {
  using L = Lanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  using Function = Act<GateMath<T>>;
  const int64_t n = p.group_size, groups = p.num_groups;
  const bool before = p.norm_before_gate;
  parallel_rows(p.num_rows * groups, 3 * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / groups, start = item % groups * n;
      const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row) + start;
      const T* gate = static_cast<const T*>(p.gate) + p.gate_rows.offset(row) + start;
      const T* weight = static_cast<const T*>(p.weight) + start;
      T* out = static_cast<T*>(p.output) + p.output_rows.offset(row) + start;
      const auto [squares] = row_sums<L, 1>(n, [&](int64_t i, int count, std::array<V, 1>& totals) {
        const V x = L::load(in + i, count), u = before ? x : Function::apply(L::load(gate + i, count), x);
        totals[0] += u * u;
      });
      const S scale = static_cast<S>(1 / std::sqrt(squares / static_cast<double>(n) + p.eps.get()));
      for_lanes_of<L>(n, [&](int64_t i, int count) {
        const V x = L::load(in + i, count), z = L::load(gate + i, count), w = L::load(weight + i, count) * scale;
        L::store(out + i, before ? Function::apply(z, x * w) : Function::apply(z, x) * w, count);
      });
    }
  });
}

template <typename T>
void gated_rms_norm(const GatedRmsNormParams& p) {
  p.sigmoid ? gated_rms_norm_of<T, Sigmoid>(p) : gated_rms_norm_of<T, Silu>(p);
}

}  // namespace flashinfer::cpu
