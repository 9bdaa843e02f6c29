// RMSNorm and LayerNorm, and their gradients.
#include <flashinfer/cpu/norm.h>
#include <flashinfer/cpu/norm_backward.h>

#include "harness.h"

using namespace driver;

constexpr int64_t kRows = 5, kStride = 1200;

double mean_of(int64_t n, const std::vector<double>& x) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total / static_cast<double>(n);
}

template <typename T>
void rms(int64_t n, bool with_residual, float offset) {
  const auto input = drawn<T>(kRows * kStride), weight = drawn<T>(n);
  const auto before = drawn<T>(kRows * kStride);
  auto residual = before, output = unwritten<T>(kRows * kStride);
  RmsNormParams p{};
  p.input = input.data(), p.weight = weight.data(), p.output = output.data();
  p.residual = with_residual ? residual.data() : nullptr;
  p.input_rows = p.residual_rows = p.output_rows = rows(kRows, kStride);
  p.num_rows = kRows, p.hidden_size = n, p.eps = {1e-5, nullptr}, p.weight_offset = offset;
  cpu::rms_norm<T>(p);
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<double> x(n), squares(n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = row * kStride + i;
      x[i] = value(input[at]) + (with_residual ? value(before[at]) : 0), squares[i] = x[i] * x[i];
      if (with_residual) check_rounded("residual", at, residual[at], x[i], 1e-7);
    }
    const double scale = 1 / std::sqrt(mean_of(n, squares) + 1e-5);
    for (int64_t i = 0; i < n; ++i)
      check_rounded("rms_norm", i, output[row * kStride + i], x[i] * scale * (value(weight[i]) + offset), 1e-6);
    if (n < kStride) check("behind a row", row, value(output[row * kStride + n]), NAN, 0);
  }
}

template <typename T, typename W>
void layer(int64_t n) {
  const auto input = drawn<T>(kRows * kStride, 3);
  const auto gamma = drawn<W>(n), beta = drawn<W>(n);
  auto output = unwritten<T>(kRows * kStride);
  LayerNormParams p{};
  p.input = input.data(), p.gamma = gamma.data(), p.beta = beta.data(), p.output = output.data();
  p.input_rows = p.output_rows = rows(kRows, kStride);
  p.num_rows = kRows, p.hidden_size = n, p.eps = {1e-5, nullptr};
  cpu::layer_norm<T, W>(p);
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<double> x(n), squares(n);
    for (int64_t i = 0; i < n; ++i) x[i] = value(input[row * kStride + i]);
    const double mean = mean_of(n, x);
    for (int64_t i = 0; i < n; ++i) squares[i] = (x[i] - mean) * (x[i] - mean);
    const double scale = 1 / std::sqrt(mean_of(n, squares) + 1e-5);
    for (int64_t i = 0; i < n; ++i) {
      const double want = (x[i] - mean) * scale * value(gamma[i]) + value(beta[i]);
      check_rounded("layer_norm", i, output[row * kStride + i], want, 4e-6);
    }
  }
}

template <typename T>
void rms_backward(int64_t n) {
  const auto grad = drawn<T>(kRows * n), input = drawn<T>(kRows * n), weight = drawn<T>(n);
  auto grad_input = unwritten<T>(kRows * n), grad_weight = unwritten<T>(n);
  RmsNormBackwardParams p{};
  p.grad = grad.data(), p.input = input.data(), p.weight = weight.data();
  p.grad_input = grad_input.data(), p.grad_weight = grad_weight.data();
  p.grad_rows = p.input_rows = rows(kRows, n);
  p.num_rows = kRows, p.num_parts = 2, p.hidden_size = n, p.eps = {1e-5, nullptr};
  auto parts = unwritten<double>(p.num_parts * n);
  p.parts = parts.data();
  cpu::rms_norm_backward<T>(p);
  std::vector<double> sums(n);
  for (int64_t row = 0; row < kRows; ++row) {
    std::vector<double> squares(n), products(n);
    for (int64_t i = 0; i < n; ++i) {
      const double x = value(input[row * n + i]);
      squares[i] = x * x, products[i] = value(grad[row * n + i]) * value(weight[i]) * x;
    }
    const double r = 1 / std::sqrt(mean_of(n, squares) + 1e-5), c = mean_of(n, products);
    for (int64_t i = 0; i < n; ++i) {
      const double x = value(input[row * n + i]), g = value(grad[row * n + i]);
      sums[i] += g * x * r;
      check_rounded("rms_norm_backward", i, grad_input[row * n + i], r * (g * value(weight[i]) - x * r * r * c), 1e-5);
    }
  }
  for (int64_t i = 0; i < n; ++i) check_rounded("grad_weight", i, grad_weight[i], sums[i], 1e-5);
}

void run() {
  for (const int64_t n : {1, 8, 67, 1163}) {
    rms<float>(n, false, 0), rms<half_t>(n, true, 0), rms<bfloat16_t>(n, true, 1);
    layer<float, float>(n), layer<bfloat16_t, float>(n);
    rms_backward<float>(n), rms_backward<half_t>(n);
  }
}
