// Quantisation of groups to 8 bits with a scale for each group: rounded to nearest and clamped.
#include <flashinfer/cpu/group_quant.h>

#include "eight_bits.h"

using namespace driver;

constexpr int64_t kRows = 5, kScaleStride = 8;

// One group has zeros, and one a NaN, which leaves its scale alone.
template <typename T, typename Q>
void grouped(int64_t groups, int64_t n, bool power_of_two) {
  const int64_t stride = groups * n + 3;
  auto input = drawn<T>(kRows * stride, 3);
  for (int64_t i = 0; i < n; ++i) set(input[stride + i], 0);
  set(input[3 * stride + n / 2], NAN);
  auto output = unwritten<Q>(kRows * stride);
  std::vector<float> scale(groups * kScaleStride, NAN);
  GroupQuantParams p{};
  p.input = input.data(), p.output = output.data(), p.scale = scale.data();
  p.input_stride = p.output_stride = stride, p.scale_row_stride = 1, p.scale_group_stride = kScaleStride;
  p.num_rows = kRows, p.num_groups = groups, p.group_size = n, p.eps = 1e-5f, p.power_of_two = power_of_two;
  p.dtype = kType<T>, p.output_dtype = sizeof(Q) == 1 && kFormat<Q>.most == 127 ? DType::kInt8 : DType::kFloat8E4M3;
  cpu::group_quant<T, Q>(p);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t from = row * stride + group * n;
      double largest = 1e-5f;
      for (int64_t i = from; i < from + n; ++i)
        if (!std::isnan(value(input[i]))) largest = std::max(largest, std::fabs(value(input[i])));
      double want = static_cast<float>(largest) / static_cast<float>(kFormat<Q>.most);
      if (power_of_two) {
        int exponent;
        const double mantissa = std::frexp(want, &exponent);
        want = std::ldexp(1, mantissa == 0.5 ? exponent - 1 : exponent);
      }
      check("scale", row, scale[group * kScaleStride + row], want, 0);
      for (int64_t i = from; i < from + n; ++i) {
        const Format& format = kFormat<Q>;
        const double exact = value(input[i]) / want;
        const double lowest = std::is_same_v<Q, int8_t> ? -127 : format.min_number;
        check_eight_bits("group_quant", i, output[i],
                         std::isnan(exact) ? exact : std::clamp(exact, lowest, format.most));
      }
    }
    check("behind a row", row, number_of(output[row * stride + groups * n]), kUnwritten<Q>, 0);
    check("behind a scale", row, row < 3 ? scale[kRows + row] : NAN, NAN, 0);
  }
}

template <typename T>
void of_type(int64_t groups, int64_t n) {
  for (const bool power_of_two : {false, true})
    grouped<T, fp8_e4m3_t>(groups, n, power_of_two), grouped<T, int8_t>(groups, n, power_of_two);
}

void run() {
  for (const int64_t n : {16, 64, 128, 200})
    for (const int64_t groups : {1, 3})
      of_type<float>(groups, n), of_type<half_t>(groups, n), of_type<bfloat16_t>(groups, n);
}
