// silu, gelu and its tanh form times the other half of a row, and their gradients.
#include <flashinfer/cpu/activation.h>
#include <flashinfer/cpu/activation_backward.h>

#include "harness.h"

using namespace driver;

constexpr int64_t kRows = 3;

struct Function {
  const char* name;
  double (*act)(double);
};

double silu(double x) { return x / (1 + std::exp(-x)); }
double gelu(double x) { return x / 2 * std::erfc(-x * M_SQRT1_2); }
double gelu_tanh(double x) { return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double slope(double (*act)(double), double x) { return (act(x + 1e-5) - act(x - 1e-5)) / 2e-5; }

template <typename T, template <typename> class Act>
void act_and_mul(const Function& function, int64_t n) {
  const auto input = drawn<T>(kRows * 2 * n, 3), grad = drawn<T>(kRows * n);
  auto output = unwritten<T>(kRows * n + 1), grad_input = unwritten<T>(kRows * 2 * n);
  ActAndMulParams p{};
  p.input = input.data(), p.output = output.data(), p.num_rows = kRows, p.out_size = n;
  p.input_rows = rows(kRows, 2 * n), p.output_rows = rows(kRows, n);
  cpu::act_and_mul<T, Act>(p);
  ActAndMulBackwardParams b{};
  b.grad = grad.data(), b.input = input.data(), b.grad_input = grad_input.data();
  b.grad_rows = rows(kRows, n), b.input_rows = rows(kRows, 2 * n), b.num_rows = kRows, b.out_size = n;
  cpu::act_and_mul_backward<T, Act>(b);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = row * 2 * n + i;
      const double x = value(input[at]), y = value(input[at + n]), g = value(grad[row * n + i]);
      const double act = function.act(x), relative = 4e-6 * std::fabs(act);
      check_rounded(function.name, at, output[row * n + i], act * y, relative, std::fabs(y));
      check_rounded("by x", at, grad_input[at], slope(function.act, x) * y * g, 2e-5, std::fabs(y * g));
      check_rounded("by y", at, grad_input[at + n], act * g, relative, std::fabs(g));
    }
  }
  check("behind the rows", kRows * n, value(output[kRows * n]), NAN, 0);
}

void run() {
  for (const int64_t n : {1, 37, 4100}) {
    act_and_mul<float, Silu>({"silu", silu}, n), act_and_mul<half_t, Silu>({"silu", silu}, n);
    act_and_mul<bfloat16_t, Gelu>({"gelu", gelu}, n), act_and_mul<float, Gelu>({"gelu", gelu}, n);
    act_and_mul<half_t, GeluTanh>({"gelu_tanh", gelu_tanh}, n);
  }
}
