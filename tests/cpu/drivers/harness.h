// Shared by the drivers: numbers of every element type, checks against double, and threads.
//
// A driver is a program for one family of CPU kernels. Without torch it can be compiled for other processors
// and run by an emulator. `driver SEED` draws numbers by the seed and exits with 0 if all checks hold.
// `driver SEED fault` falsifies one number in a hundred and must fail.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/convert.h>

// torch's threads: three pieces in sequence, so that work is split and joined.
extern "C" inline int32_t torch_get_num_threads(uint32_t* threads) {
  *threads = 3;
  return 0;
}
extern "C" inline int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                             void (*body)(int64_t, int64_t, void*), void* context) {
  const int64_t step = std::max(grain, (end - begin + 2) / 3);
  for (int64_t i = begin; i < end; i += step) body(i, std::min(i + step, end), context);
  return 0;
}

void run();  // defined by each driver

namespace driver {

using namespace flashinfer;
using flashinfer::cpu::to_float;

inline std::mt19937_64 engine;
inline int64_t checks = 0, failures = 0;
inline bool falsifies = false;

// DType of an element type.
template <typename T>
constexpr DType kType = DType::kFloat32;
template <>
inline constexpr DType kType<half_t> = DType::kFloat16;
template <>
inline constexpr DType kType<bfloat16_t> = DType::kBFloat16;
template <>
inline constexpr DType kType<double> = DType::kFloat64;
template <>
inline constexpr DType kType<fp8_e4m3_t> = DType::kFloat8E4M3;
template <>
inline constexpr DType kType<fp8_e5m2_t> = DType::kFloat8E5M2;

inline Rows rows(int64_t count, int64_t stride) { return {count, 1, 0, 0, stride}; }

inline double value(double x) { return x; }
template <typename T>
double value(T x) {
  return to_float(x);
}

inline int drawn_int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }

template <typename T>
void set(T& to, double number) {
  if constexpr (sizeof(T) == 1) {  // any number except NaN and infinities
    do to.bits = static_cast<uint8_t>(engine());
    while (!(std::fabs(value(to)) <= 4));
  } else if constexpr (sizeof(T) == 8) {
    to = number;
  } else {
    to = cpu::from_float<T>(static_cast<float>(number));
  }
}

// Draw normal numbers, or random bits for 8-bit types.
template <typename T>
std::vector<T> drawn(int64_t count, double scale = 1) {
  std::normal_distribution<double> normal(0, scale);
  std::vector<T> result(count);
  for (T& one : result) set(one, normal(engine));
  return result;
}

// Return NaN of every floating-point type, so that missing writes show.
template <typename T>
std::vector<T> unwritten(int64_t count) {
  std::vector<T> result(count);
  std::memset(static_cast<void*>(result.data()), 0xff, count * sizeof(T));
  return result;
}

// Half an ulp, relative to a number.
template <typename T>
constexpr double kRounding = 0x1p-24;
template <>
inline constexpr double kRounding<half_t> = 0x1p-11;
template <>
inline constexpr double kRounding<bfloat16_t> = 0x1p-8;
template <>
inline constexpr double kRounding<double> = 0x1p-52;

inline void check(const char* what, int64_t at, double got, double want, double bound) {
  if (falsifies && checks % 100 == 99) got = std::isnan(got) ? 0 : got + 1 + 4 * bound;
  ++checks;
  const bool same = got == want || (std::isnan(got) && std::isnan(want));
  if (same || std::fabs(got - want) <= bound) return;
  if (++failures <= 10)
    std::printf("%s[%lld]: got %.9g, wanted %.9g within %.3g\n", what, static_cast<long long>(at), got, want, bound);
}

// Check a result of type T within its own rounding and `slack` for the arithmetic before, relative to `size`.
template <typename T>
void check_rounded(const char* what, int64_t at, T got, double want, double slack, double size = 1) {
  const double denormal = sizeof(T) == 2 && kRounding<T> == 0x1p-11 ? 0x1p-25 : 1e-40;
  check(what, at, value(got), want, 1.01 * kRounding<T> * std::fabs(want) + slack * size + denormal);
}

}  // namespace driver

int main(int count, char** words) {
  if (count < 2) return std::fprintf(stderr, "usage: %s SEED [fault]\n", words[0]), 2;
  driver::engine.seed(std::strtoull(words[1], nullptr, 10));
  driver::falsifies = count > 2 && !std::strcmp(words[2], "fault");
  run();
  std::printf("%lld checks, %lld failures\n", static_cast<long long>(driver::checks),
              static_cast<long long>(driver::failures));
  return driver::failures != 0;
}
