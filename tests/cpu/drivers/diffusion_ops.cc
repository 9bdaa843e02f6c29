// Norm over all heads of queries and keys, and rotary embeddings of three axes.
#include <flashinfer/cpu/diffusion_ops.h>

#include "eight_bits.h"

using namespace driver;

constexpr int64_t kHeads[3] = {3, 2, 1};
constexpr int64_t kFrames = 2, kHeight = 3, kWidth = 4, kTokens = 2 * kFrames * kHeight * kWidth, kGap = 5;

template <typename T, typename Q>
void rotated(int64_t dim, bool interleave, bool normalises) {
  constexpr bool kEightBits = sizeof(Q) == 1;
  QkNormRopeParams p{};
  const int64_t stride = (kHeads[0] + kHeads[1] + kHeads[2]) * dim + kGap;
  const auto input = drawn<T>(kTokens * stride);
  const std::vector<T> weights[2] = {drawn<T>(kHeads[0] * dim), drawn<T>(kHeads[1] * dim)};
  std::vector<Q> outputs[3];
  p.input = input.data(), p.input_stride = stride, p.num_tokens = kTokens, p.head_dim = dim;
  p.frames = kFrames, p.height = kHeight, p.width = kWidth;
  p.height_pair = static_cast<int32_t>(dim / 2 - 2 * (dim / 6)), p.width_pair = static_cast<int32_t>(dim / 2 - dim / 6);
  p.eps = 1e-3f, p.interleave = interleave, p.normalises = normalises, p.eight_bits = kEightBits;
  for (int64_t pair = 0; pair < dim / 2; ++pair)
    p.frequencies[pair] =
        static_cast<float>(std::pow(100.0, -2.0 * static_cast<double>(pair) / static_cast<double>(dim)));
  for (int part = 0; part < 3; ++part) {
    p.heads[part] = kHeads[part], p.output_strides[part] = kHeads[part] * dim + kGap, p.scales[part] = 2.5f;
    outputs[part] = unwritten<Q>(kTokens * p.output_strides[part]), p.outputs[part] = outputs[part].data();
  }
  p.weights[0] = weights[0].data(), p.weights[1] = weights[1].data();
  cpu::qk_norm_rope<T>(p);

  for (int64_t token = 0; token < kTokens; ++token) {
    const int64_t positions[3] = {token / (kHeight * kWidth) % kFrames, token / kWidth % kHeight, token % kWidth};
    int64_t column = token * stride;
    for (int part = 0; part < 3; ++part) {
      const int64_t n = kHeads[part] * dim, at = token * p.output_strides[part];
      std::vector<double> x(n), y(n);
      double squares = 0;
      for (int64_t i = 0; i < n; ++i) x[i] = value(input[column + i]), squares += x[i] * x[i];
      const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-3f);
      for (int64_t i = 0; i < n && part < 2 && normalises; ++i) x[i] *= factor * value(weights[part][i]);
      y = x;
      for (int64_t pair = 0; pair < kHeads[part] * dim / 2 && part < 2; ++pair) {
        const int64_t head = pair / (dim / 2) * dim, i = pair % (dim / 2);
        const int axis = i >= p.width_pair ? 2 : i >= p.height_pair ? 1 : 0;
        const double angle = static_cast<float>(positions[axis]) * p.frequencies[i];
        const int64_t a = head + (interleave ? 2 * i : i), b = head + (interleave ? 2 * i + 1 : i + dim / 2);
        y[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle), y[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
      }
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (kEightBits)
          check_eight_bits("qk_norm_rope", at + i, outputs[part][at + i], y[i] * 2.5, 1e-5);
        else
          check_rounded("qk_norm_rope", at + i, outputs[part][at + i], y[i], 1e-5);
      }
      check("behind a token", token, value(outputs[part][at + n]), NAN, 0);
      column += n;
    }
  }
}

void run() {
  for (const int64_t dim : {12, 64, 128})
    for (const bool interleave : {false, true})
      for (const bool normalises : {false, true}) {
        rotated<bfloat16_t, bfloat16_t>(dim, interleave, normalises);
        rotated<bfloat16_t, fp8_e4m3_t>(dim, interleave, normalises);
        rotated<float, float>(dim, interleave, normalises);
      }
}
