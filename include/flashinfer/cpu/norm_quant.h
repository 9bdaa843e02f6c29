// RMSNorm with a quantised result on the CPU: a row at a time per thread, in two passes of which the second
// hits the cache.
#pragma once

#include <flashinfer/common/norm_quant.h>
#include <flashinfer/cpu/norm.h>
#include <flashinfer/cpu/simd/quantize.h>

namespace flashinfer::cpu {

template <typename T, typename Q>
void rms_norm_quant(const RmsNormQuantParams& p) {
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t n = p.hidden_size;
  const double rcp_scale = p.rcp_scale();
  parallel_rows(p.num_rows, (p.residual ? 4 : 2) * n * static_cast<int64_t>(sizeof(T)),
                [&](int64_t first, int64_t last) {
                  for (int64_t row = first; row < last; ++row) {
                    const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
                    T* res = p.residual ? static_cast<T*>(p.residual) + p.residual_rows.offset(row) : nullptr;
                    Q* out = static_cast<Q*>(p.output) + p.output_rows.offset(row);
                    const auto one = [&](int64_t i, int count) {
                      return res ? load(in + i, count) + load(res + i, count) : load(in + i, count);
                    };
                    vdouble low{}, high{};
                    for_lanes(n, [&](int64_t i, int count) {
                      const Wide x = widen(one(i, count));
                      low += x.low * x.low, high += x.high * x.high;
                    });
                    const double scale = inverse_root(sum(low) + sum(high), n, p.eps) * rcp_scale;
                    for_lanes(n, [&](int64_t i, int count) {
                      const vfloat x = one(i, count);
                      if (res) store(res + i, x, count);
                      store_quantized(out + i, scaled<float>(x, scale, load(weight + i, count)), count);
                    });
                  }
                });
}

}  // namespace flashinfer::cpu
