// RMSNorm with a gate, before it and behind it, and its gradients.
#include <flashinfer/cpu/gated_norm.h>
#include <flashinfer/cpu/gated_norm_backward.h>

#include "harness.h"

using namespace driver;

template <typename T>
void gated(int64_t num_rows, int64_t groups, int64_t n, bool before, bool is_sigmoid) {
  const int64_t hidden = groups * n, stride = hidden + 5, all = num_rows * hidden;
  const double slack = sizeof(T) == 8 ? 1e-9 : 2e-6, eps = 1e-3;
  const auto x = drawn<T>(num_rows * stride), z = drawn<T>(all, 3), w = drawn<T>(hidden), grad = drawn<T>(all);
  auto out = unwritten<T>(all), dx = unwritten<T>(all), dz = unwritten<T>(all), dw = unwritten<T>(hidden);
  const Rows strided = rows(num_rows, stride), dense = rows(num_rows, hidden);
  const GatedRmsNormParams p{x.data(), z.data(), w.data(), out.data(),     strided,    dense,  dense,
                             num_rows, groups,   n,        {eps, nullptr}, is_sigmoid, before, kType<T>};
  cpu::gated_rms_norm<T>(p);
  const int64_t num_parts = cpu::norm_backward_parts(num_rows, hidden);
  std::vector<double> parts(num_parts * hidden);
  GatedRmsNormBackwardParams b{};
  b.grad = grad.data(), b.input = x.data(), b.gate = z.data(), b.weight = w.data();
  b.grad_input = dx.data(), b.grad_gate = dz.data(), b.grad_weight = dw.data(), b.parts = parts.data();
  b.grad_rows = dense, b.input_rows = strided, b.gate_rows = dense, b.num_rows = num_rows, b.num_parts = num_parts;
  b.num_groups = groups, b.group_size = n, b.eps = {eps, nullptr}, b.sigmoid = is_sigmoid, b.norm_before_gate = before;
  b.dtype = kType<T>;
  cpu::gated_rms_norm_backward<T>(b);

  std::vector<double> sums(hidden), sizes(hidden);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t start = 0; start < hidden; start += n) {
      const auto of = [&](int64_t i, double& value_, double& act, double& slope, double& factor, double& given) {
        const double gate = value(z[row * hidden + start + i]), s = 1 / (1 + std::exp(-gate));
        value_ = value(x[row * stride + start + i]);
        act = is_sigmoid ? s : gate * s;
        slope = is_sigmoid ? s * (1 - s) : s * (1 + gate * (1 - s));
        factor = value(w[start + i]), given = value(grad[row * hidden + start + i]);
      };
      double v, a, d, f, g, squares = 0, products = 0, size = 0;
      for (int64_t i = 0; i < n; ++i) {
        of(i, v, a, d, f, g);
        squares += before ? v * v : v * a * v * a;
        products += g * f * v * a, size += std::fabs(g * f * v * a);
      }
      const double r = 1 / std::sqrt(squares / n + eps), c = products / n * r * r * r, most = size / n * r * r * r;
      for (int64_t i = 0; i < n; ++i) {
        of(i, v, a, d, f, g);
        const int64_t at = row * hidden + start + i;
        const double h = g * f, u = v * a, du = h * r - u * c, error = std::fabs(h * r) + std::fabs(u) * most;
        check_rounded("out", at, out[at], u * r * f, slack, std::fabs(v * r * f) * (1 + std::fabs(a)));
        check_rounded("dx", at, dx[at], before ? h * a * r - v * c : du * a, slack,
                      before ? std::fabs(h * a * r) + std::fabs(v) * most : error * (1 + std::fabs(a)));
        check_rounded("dgate", at, dz[at], before ? h * v * r * d : du * v * d, slack,
                      (before ? std::fabs(h * v * r) : error * std::fabs(v)) * 2);
        sums[start + i] += g * u * r, sizes[start + i] += std::fabs(g * v * r) * (1 + std::fabs(a));
      }
    }
  for (int64_t i = 0; i < hidden; ++i) check_rounded("dweight", i, dw[i], sums[i], slack, sizes[i]);
}

void run() {
  for (const bool before : {true, false})
    for (const bool is_sigmoid : {true, false}) {
      gated<float>(9, 3, 40, before, is_sigmoid), gated<half_t>(5, 1, 133, before, is_sigmoid);
      gated<bfloat16_t>(4, 2, 64, before, is_sigmoid), gated<double>(3, 5, 7, before, is_sigmoid);
    }
}
