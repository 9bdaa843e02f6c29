// Vectors: every half, every float8, and the elementary functions.
#include <flashinfer/cpu/simd/lanes.h>
#include <flashinfer/cpu/simd/transpose.h>

#include "harness.h"

using namespace driver;
using cpu::kLanes, cpu::vfloat;

// Return a number by its bits (sign, exponent, mantissa), biased so that the smallest exponents are denormal.
double by_bits(uint32_t bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1),
                 exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) ? -1 : 1;
  const bool last = exponent == (1u << exponent_bits) - 1;
  if (last && has_infinity) return mantissa ? NAN : sign * INFINITY;
  if (last && mantissa == (1u << mantissa_bits) - 1) return NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1u << mantissa_bits) + mantissa, static_cast<int>(exponent) - bias - mantissa_bits);
}

template <typename T>
void loads(const char* what, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const uint32_t count = 1u << (8 * sizeof(T));
  for (uint32_t bits = 0; bits < count; bits += kLanes) {
    T elements[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) elements[lane].bits = static_cast<decltype(T::bits)>(bits + lane);
    const vfloat vector = cpu::load(elements);
    for (int lane = 0; lane < kLanes; ++lane) {
      const double want = by_bits(bits + lane, exponent_bits, mantissa_bits, has_infinity);
      check(what, bits + lane, vector[lane], want, 0);
      check(what, bits + lane, to_float(elements[lane]), want, 0);
    }
  }
}

// Numbers between two neighbours round to the nearer one, and ties to even.
template <typename T>
void stores(const char* what) {
  for (uint32_t bits = 0; bits < 0x7c00; bits += 3) {
    const double low = to_float(T{static_cast<uint16_t>(bits)}), high = to_float(T{static_cast<uint16_t>(bits + 1)});
    if (std::isinf(high)) break;
    const float middle = static_cast<float>((low + high) / 2);
    const double even = bits & 1 ? high : low;
    const float numbers[] = {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY), -middle};
    const double wants[] = {even, low, high, -even};
    vfloat vector{};
    for (int i = 0; i < 4; ++i) vector[i] = numbers[i];
    T stored[kLanes];
    cpu::store(stored, vector);
    for (int i = 0; i < 4; ++i) {
      check(what, bits, to_float(stored[i]), wants[i], 0);
      check(what, bits, to_float(cpu::from_float<T>(numbers[i])), wants[i], 0);
    }
  }
  const float special[] = {INFINITY, -INFINITY, NAN, 3.4e38f};
  for (const float number : special) {
    T stored[kLanes];
    cpu::store(stored, cpu::splat(number));
    const double want = sizeof(T) == 2 && number == 3.4e38f ? to_float(stored[0]) : number;
    check(what, -1, to_float(stored[kLanes - 1]), want, 0);
  }
}

template <typename F, typename G>
void function(const char* what, double low, double high, double relative, double absolute, const F& ours,
              const G& exact) {
  std::uniform_real_distribution<double> between(low, high);
  for (int i = 0; i < 300; ++i) {
    vfloat x;
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = static_cast<float>(between(engine));
    const vfloat y = ours(x);
    for (int lane = 0; lane < kLanes; ++lane) {
      const double want = exact(static_cast<double>(x[lane]));
      check(what, lane, y[lane], want, relative * std::fabs(want) + absolute);
    }
  }
}

void lanes() {
  const auto rows = drawn<float>(kLanes * kLanes);
  vfloat square[kLanes], summed[kLanes];
  for (int i = 0; i < kLanes; ++i) square[i] = summed[i] = cpu::load(&rows[i * kLanes]);
  cpu::transpose(square);
  const vfloat sums = cpu::sums_of(summed);
  for (int i = 0; i < kLanes; ++i) {
    double total = 0, most = -INFINITY;
    for (int j = 0; j < kLanes; ++j) {
      check("transpose", i * kLanes + j, square[i][j], rows[j * kLanes + i], 0);
      total += rows[i * kLanes + j], most = std::max<double>(most, rows[i * kLanes + j]);
    }
    check("sums_of", i, sums[i], total, 1e-5);
    check("total_of", i, cpu::total_of(cpu::load(&rows[i * kLanes])), total, 1e-5);
    check("maximum_of", i, cpu::maximum_of(cpu::load(&rows[i * kLanes])), most, 0);
  }
  const vfloat x = cpu::load(rows.data()), both = cpu::narrow(cpu::widen(x)), swapped = cpu::swap_pairs(x);
  const auto wide = cpu::Lanes<float>::load(rows.data(), cpu::kWideLanes);
  for (int lane = 0; lane < kLanes; ++lane) {
    check("narrow", lane, both[lane], x[lane], 0);
    check("swap_pairs", lane, swapped[lane], x[lane ^ 1], 0);
    if (lane < cpu::kWideLanes) check("load_wide", lane, wide[lane], x[lane], 0);
  }
}

void run() {
  loads<half_t>("half", 5, 10, true);
  loads<bfloat16_t>("bfloat16", 8, 7, true);
  loads<fp8_e4m3_t>("e4m3", 4, 3, false);
  loads<fp8_e5m2_t>("e5m2", 5, 2, true);
  stores<half_t>("to half");
  stores<bfloat16_t>("to bfloat16");
  lanes();
  function("exp2", -125, 126, 3e-7, 0, [](vfloat x) { return cpu::exp2(x); }, [](double x) { return std::exp2(x); });
  function("exp2", -300, -127, 0, 0, [](vfloat x) { return cpu::exp2(x); }, [](double) { return 0.0; });
  function("exp", -86, 86, 3e-7, 0, [](vfloat x) { return cpu::exp(x); }, [](double x) { return std::exp(x); });
  function("tanh", -9, 9, 0, 5e-7, [](vfloat x) { return cpu::tanh(x); }, [](double x) { return std::tanh(x); });
  const auto quarters = [](vfloat x) {
    const cpu::Wide wide = cpu::widen(x);
    return cpu::sincos_quarters({wide.low, wide.high});
  };
  function(
      "sin", -1e6, 1e6, 0, 3e-7, [&](vfloat x) { return quarters(x).sin; },
      [](double x) { return std::sin(std::remainder(x, 4.0) * M_PI / 2); });
  function(
      "cos", -1e6, 1e6, 0, 3e-7, [&](vfloat x) { return quarters(x).cos; },
      [](double x) { return std::cos(std::remainder(x, 4.0) * M_PI / 2); });
}
