// RMSNorm with an 8-bit result: rounded to nearest and clamped to the finite numbers of its type.
#include <flashinfer/cpu/norm_quant.h>

#include "harness.h"

using namespace driver;

constexpr int64_t kRows = 5, kStride = 1200;

// An 8-bit type: mantissa bits, exponent of the smallest normal number, and limits.
struct Format {
  int mantissa, least;
  double most, least_number = -most;

  // Return the largest distance of a number from the nearest number of the type.
  double half_unit(double number) const {
    const int exponent = number == 0 ? least : std::max(std::ilogb(number), least);
    return std::ldexp(0.5, exponent - mantissa);
  }
};

template <typename Q>
constexpr Format kFormat = {3, -6, 448};
template <>
inline constexpr Format kFormat<fp8_e5m2_t> = {2, -14, 57344};
template <>
inline constexpr Format kFormat<int8_t> = {7, 7, 127, -128};  // unit 1 everywhere

template <typename Q>
constexpr double kNan = std::is_same_v<Q, int8_t> ? 0 : NAN;
template <typename Q>
constexpr double kUnwritten = std::is_same_v<Q, int8_t> ? -1 : NAN;

template <typename Q>
double number_of(Q x) {
  if constexpr (std::is_same_v<Q, int8_t>)
    return x;
  else
    return value(x);
}

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
  p.scale = {by_tensor ? unread : scale, nullptr}, p.scale_at = by_tensor ? &scale : nullptr;
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
      const double exact = x[i] * factor * value(weight[i]);
      const double want = std::isnan(exact) ? kNan<Q> : std::clamp(exact, kFormat<Q>.least_number, kFormat<Q>.most);
      const double bound = std::isnan(exact) ? 0 : kFormat<Q>.half_unit(want) + 1e-6 * std::fabs(want);
      check("rms_norm_quant", at, number_of(output[at]), want, bound);
    }
    check("behind a row", row, number_of(output[row * kStride + n]), kUnwritten<Q>, 0);
    if (with_residual && n < kStride) {
      const int64_t at = row * kStride + n;
      check("residual behind a row", at, value(residual[at]), value(before[at]), 0);
    }
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
    of_type<fp8_e4m3_t>(n, 0.003f), of_type<fp8_e5m2_t>(n, 2e-5f), of_type<int8_t>(n, 0.003f);
  }
}
