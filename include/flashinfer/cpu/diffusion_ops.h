// RMSNorm over all heads and rotary embeddings of three axes on the CPU, a token at a time per thread.
#pragma once

#include <cmath>
#include <vector>

#include <flashinfer/common/diffusion_ops.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/quantize.h>

namespace flashinfer::cpu {

inline void rotate_token(const QkNormRopeParams& p, int64_t heads, float* row, const std::vector<float>& turns) {
  const int64_t half = p.head_dim / 2;
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t i = 0; i < half; ++i) {
      float& first = row[head * p.head_dim + (p.interleave ? 2 * i : i)];
      float& second = row[head * p.head_dim + (p.interleave ? 2 * i + 1 : i + half)];
      const float a = first, b = second, cosine = turns[2 * i], sine = turns[2 * i + 1];
      first = a * cosine - b * sine, second = b * cosine + a * sine;
    }
}

template <typename T>
void qk_norm_rope(const QkNormRopeParams& p) {
  const int64_t bytes = 2 * (p.first_column(2) + p.heads[2] * p.head_dim) * static_cast<int64_t>(sizeof(T));
  parallel_rows(p.num_tokens, bytes, [&](int64_t first, int64_t last) {
    std::vector<float> row, turns(p.head_dim);
    for (int64_t token = first; token < last; ++token) {
      for (int i = 0; i < p.head_dim / 2; ++i) {
        const float angle = p.angle(token, i);
        turns[2 * i] = std::cos(angle), turns[2 * i + 1] = std::sin(angle);
      }
      for (int part = 0; part < 3; ++part) {
        const int64_t n = p.heads[part] * p.head_dim;
        const T* in = static_cast<const T*>(p.input) + token * p.input_stride + p.first_column(part);
        row.resize(n);
        double squares = 0;
        for (int64_t i = 0; i < n; ++i) row[i] = to_float(in[i]), squares += static_cast<double>(row[i]) * row[i];
        if (part < 2 && p.normalises) {
          const auto factor = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(n) + p.eps));
          for (int64_t i = 0; i < n; ++i) row[i] *= factor * to_float(static_cast<const T*>(p.weights[part])[i]);
        }
        if (part < 2) rotate_token(p, p.heads[part], row.data(), turns);
        const int64_t at = token * p.output_strides[part];
        for_lanes(n, [&](int64_t i, int count) {
          const vfloat y = load(&row[i], count);
          if (p.eight_bits)
            store_quantized(static_cast<fp8_e4m3_t*>(p.outputs[part]) + at + i, y * splat(p.scales[part]), count);
          else
            store(static_cast<T*>(p.outputs[part]) + at + i, y, count);
        });
      }
    }
  });
}

}  // namespace flashinfer::cpu
