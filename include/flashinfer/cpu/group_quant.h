// Quantisation of groups on the CPU: the second pass over a group hits the first-level cache.
#pragma once

#include <algorithm>
#include <cmath>

#include <flashinfer/common/group_quant.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/math.h>
#include <flashinfer/cpu/simd/quantize.h>

namespace flashinfer::cpu {

template <typename T, typename Q>
void group_quant(const GroupQuantParams& p) {
  const int64_t n = p.group_size;
  parallel_rows(p.num_rows, 2 * p.num_groups * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int64_t group = 0; group < p.num_groups; ++group) {
        const T* in = static_cast<const T*>(p.input) + row * p.input_stride + group * n;
        Q* out = static_cast<Q*>(p.output) + row * p.output_stride + group * n;
        vfloat max_abs{};
        for_lanes(n, [&](int64_t i, int count) {
          const vfloat magnitude = abs(load(in + i, count));
          max_abs = select(magnitude > max_abs, magnitude, max_abs);  // ignores NaN, as the maximum on CUDA does
        });
        float amax = 0;
        for (int lane = 0; lane < kLanes; ++lane) amax = std::max(amax, max_abs[lane]);
        const float scale = p.scale_of(amax);
        for_lanes(n,
                  [&](int64_t i, int count) { store_quantized(out + i, load(in + i, count) / splat(scale), count); });
        p.scale[row * p.scale_row_stride + group * p.scale_group_stride] = scale;
      }
    }
  });
}

}  // namespace flashinfer::cpu
