// Norms with a quantised result on the CPU: a row at a time per thread, in two passes of which the second
// hits the cache.
#pragma once

#include <algorithm>
#include <cmath>

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

template <typename T, typename W, typename Q>
void layer_norm_quant(const LayerNormQuantParams& p) {
  const W* gamma = static_cast<const W*>(p.gamma);
  const W* beta = static_cast<const W*>(p.beta);
  const int64_t n = p.hidden_size;
  const auto rcp_scale = static_cast<float>(p.rcp_scale());
  parallel_rows(p.num_rows, 2 * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
      Q* out = static_cast<Q*>(p.output) + p.output_rows.offset(row);
      const Moments moments = moments_of(in, n);
      const double scale = inverse_root(moments.squares, n, p.eps);
      for_lanes(n, [&](int64_t i, int count) {
        const vfloat y =
            shifted<T>(load(in + i, count), moments.mean, scale, load(gamma + i, count), load(beta + i, count));
        store_quantized(out + i, rounded_to<T>(y) * splat(rcp_scale), count);
      });
    }
  });
}

template <typename T>
void rms_norm_block_quant(const RmsNormBlockQuantParams& p) {
  static_assert(kQuantBlock % kLanes == 0, "a block is whole vectors");
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t n = p.hidden_size;
  parallel_rows(p.num_rows, 5 * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* in = static_cast<const T*>(p.input) + row * p.input_stride;
      T* res = static_cast<T*>(p.residual) + row * p.residual_stride;
      T* normed = static_cast<T*>(p.normed) + row * p.normed_stride;
      auto* out = static_cast<fp8_e4m3_t*>(p.output) + row * p.output_stride;
      vdouble low{}, high{};
      for_lanes(n, [&](int64_t i, int) {
        const Wide x = widen(load(in + i) + load(res + i));
        low += x.low * x.low, high += x.high * x.high;
      });
      const double factor = inverse_root(sum(low) + sum(high), n, p.eps);
      for (int64_t start = 0; start < n; start += kQuantBlock) {
        float maximum = kMinBlockMaximum;
        for (int64_t i = start; i < start + kQuantBlock; i += kLanes) {
          const vfloat x = load(in + i) + load(res + i);
          const vfloat y = rounded_to<T>(scaled<T>(x, factor, load(weight + i)));
          store(res + i, x), store(normed + i, y);
          for (int lane = 0; lane < kLanes; ++lane) maximum = std::max(maximum, std::fabs(y[lane]));
        }
        const float scale = maximum / kMaxE4M3;
        for (int64_t i = start; i < start + kQuantBlock; i += kLanes)
          store_quantized(out + i, load(normed + i) / splat(scale), kLanes);
        p.scale[start / kQuantBlock * p.scale_block_stride + row * p.scale_row_stride] = scale;
      }
    }
  });
}

}  // namespace flashinfer::cpu
