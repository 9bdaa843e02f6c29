// Norms with an 8-bit result: rounded to nearest and clamped to the finite numbers of its type.
#include <flashinfer/cpu/norm_quant.h>

#include "eight_bits.h"

using namespace driver;

constexpr int64_t kRows = 5, kStride = 1200;

// With `by_tensor`, eps and the scale are read from memory. One row has a NaN, which fills its result.
template <typename T, typename Q>
void quantised(int64_t n, bool with_residual, bool by_tensor, float scale) {
  auto input = drawn<T>(kRows * kStride);
  set(input[3 * kStride + n / 2], NAN);
  const auto weight = drawn<T>(n), before = drawn<T>(kRows * kStride);
  auto residual = before;
  auto output = unwritten<Q>(kRows * kStride);
  const double eps = 1e-3, unread = 7;
  RmsNormQuantParams p{};
  p.input = input.data(), p.weight = weight.data(), p.output = output.data();
  p.residual = with_residual ? residual.data() : nullptr;
  p.input_rows = p.residual_rows = p.output_rows = rows(kRows, kStride);
  p.num_rows = kRows, p.hidden_size = n;
  p.eps = by_tensor ? Scalar{unread, &eps} : Scalar{eps, nullptr};
  p.scale = {{by_tensor ? unread : scale, nullptr}, by_tensor ? &scale : nullptr};
  cpu::rms_norm_quant<T, Q>(p);
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<double> x(n);
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = row * kStride + i;
      x[i] = value(input[at]) + (with_residual ? value(before[at]) : 0), squares += x[i] * x[i];
      if (with_residual) check_rounded("residual", at, residual[at], x[i], 1e-7);
    }
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + eps) / scale;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = row * kStride + i;
      check_eight_bits("rms_norm_quant", at, output[at], x[i] * factor * value(weight[i]));
    }
    check("behind a row", row, number_of(output[row * kStride + n]), kUnwritten<Q>, 0);
    if (with_residual && n < kStride) {
      const int64_t at = row * kStride + n;
      check("residual behind a row", at, value(residual[at]), value(before[at]), 0);
    }
  }
}

template <typename T, typename W, typename Q>
void centred(int64_t n, float scale) {
  const auto input = drawn<T>(kRows * kStride);
  const auto gamma = drawn<W>(n), beta = drawn<W>(n);
  auto output = unwritten<Q>(kRows * kStride);
  LayerNormQuantParams p{};
  p.input = input.data(), p.gamma = gamma.data(), p.beta = beta.data(), p.output = output.data();
  p.input_rows = p.output_rows = rows(kRows, kStride);
  p.num_rows = kRows, p.hidden_size = n;
  p.eps = {1e-3, nullptr}, p.scale = {{scale, nullptr}, nullptr};
  cpu::layer_norm_quant<T, W, Q>(p);
  for (int64_t row = 0; row < kRows; ++row) {
    double mean = 0, squares = 0;
    const auto x = [&](int64_t i) { return value(input[row * kStride + i]); };
    for (int64_t i = 0; i < n; ++i) mean += x(i) / static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i) squares += (x(i) - mean) * (x(i) - mean);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-3);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = row * kStride + i;
      const double term = (x(i) - mean) * factor * value(gamma[i]), y = term + value(beta[i]);
      const double error =
          (sizeof(T) == 2 ? std::fabs(y) / 250 : 0) + (std::fabs(term) + std::fabs(value(beta[i]))) * 1e-5;
      check_eight_bits("layer_norm_quant", at, output[at], y / scale, error / scale);
    }
    check("behind a row", row, number_of(output[row * kStride + n]), kUnwritten<Q>, 0);
  }
}

template <typename T>
void of_blocks(int64_t n) {
  const auto input = drawn<T>(kRows * kStride), weight = drawn<T>(n), before = drawn<T>(kRows * kStride);
  auto residual = before, normed = unwritten<T>(kRows * kStride);
  auto output = unwritten<fp8_e4m3_t>(kRows * kStride);
  std::vector<float> scale(n / kQuantBlock * 8, NAN);
  RmsNormBlockQuantParams p{};
  p.input = input.data(), p.residual = residual.data(), p.weight = weight.data(), p.normed = normed.data();
  p.output = output.data(), p.scale = scale.data();
  p.input_stride = p.residual_stride = p.normed_stride = p.output_stride = kStride;
  p.scale_block_stride = 8, p.scale_row_stride = 1, p.num_rows = kRows, p.hidden_size = n, p.eps = {1e-3, nullptr};
  cpu::rms_norm_block_quant<T>(p);
  for (int64_t row = 0; row < kRows; ++row) {
    double squares = 0;
    const auto x = [&](int64_t i) { return value(input[row * kStride + i]) + value(before[row * kStride + i]); };
    for (int64_t i = 0; i < n; ++i) squares += x(i) * x(i);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-3);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = row * kStride + i, block = i / kQuantBlock;
      double largest = 1e-10;
      for (int64_t j = block * kQuantBlock; j < (block + 1) * kQuantBlock; ++j)
        largest = std::max(largest, std::fabs(value(normed[row * kStride + j])));
      check_rounded("residual", at, residual[at], x(i), 1e-7);
      check_rounded("normed", at, normed[at], x(i) * factor * value(weight[i]), 1e-6);
      check("block_scale", at, scale[block * 8 + row], largest / 448, 1e-7 * largest);
      check_eight_bits("rms_norm_block_quant", at, output[at], value(normed[at]) / (largest / 448));
    }
    check("behind a row", row, number_of(output[row * kStride + n]), NAN, 0);
    check("behind a scale", row, row < 3 ? scale[kRows + row] : NAN, NAN, 0);
  }
}

// Scales that keep most numbers in range, make some subnormal, and clamp some.
template <typename Q>
void of_type(int64_t n, float small) {
  quantised<float, Q>(n, false, false, 0.02f), quantised<half_t, Q>(n, true, true, 0.02f);
  quantised<bfloat16_t, Q>(n, true, false, 60), quantised<float, Q>(n, true, true, small);
  quantised<half_t, Q>(n, false, true, small);
}

void run() {
  for (const int64_t n : {1, 8, 67, 1163}) {
    centred<float, float, fp8_e4m3_t>(n, 0.02f), centred<half_t, float, int8_t>(n, 0.02f);
    centred<bfloat16_t, bfloat16_t, fp8_e5m2_t>(n, 0.02f);
    of_type<fp8_e4m3_t>(n, 0.003f), of_type<fp8_e5m2_t>(n, 2e-5f), of_type<int8_t>(n, 0.003f);
  }
  for (const int64_t n : {128, 1152}) of_blocks<float>(n), of_blocks<half_t>(n), of_blocks<bfloat16_t>(n);
}
