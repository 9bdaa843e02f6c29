// act(x) * y on the CPU, in one pass over memory: a row at a time per thread. Few rows are split.
#pragma once

#include <cmath>
#include <type_traits>

#include <flashinfer/common/activation.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

template <typename Vector, typename Scalar>
struct VectorMath {
  using V = Vector;
  using S = Scalar;
  static constexpr double kMaxHalfExponent = sizeof(S) == 8 ? 300.0 : 86.0;

  static V exp(V x) { return cpu::exp(x); }
  static V divide(V a, V b) { return a / b; }
  static V abs(V x) { return cpu::abs(x); }
  static V select_less(V a, V b, V yes, V no) { return a < b ? yes : no; }
};

// float64 arithmetic, accurate to the last bits because gradient checks use it.
struct ExactMath : VectorMath<vdouble, double> {
  static vdouble exp(vdouble x) {
    for (int lane = 0; lane < kWideLanes; ++lane) x[lane] = std::exp(x[lane]);
    return x;
  }
};

// float32 is computed in double, half types in float.
template <typename T, template <typename> class Act>
inline vfloat act_and_mul(vfloat x, vfloat y) {
  if constexpr (std::is_same_v<T, float>) {
    using Function = Act<VectorMath<vdouble, double>>;
    const Wide a = widen(x), b = widen(y);
    return narrow({Function::apply(a.low, b.low), Function::apply(a.high, b.high)});
  } else {
    return Act<VectorMath<vfloat, float>>::apply(x, y);
  }
}

template <typename T, template <typename> class Act>
void act_and_mul(const ActAndMulParams& p) {
  // Size of the pieces of a row, so that many threads share one long row.
  constexpr int64_t kPiece = 4096;
  const int64_t n = p.out_size, pieces = (n + kPiece - 1) / kPiece;
  const int64_t bytes = 3 * (n < kPiece ? n : kPiece) * static_cast<int64_t>(sizeof(T));
  parallel_rows(p.num_rows * pieces, bytes, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / pieces, start = item % pieces * kPiece;
      const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row) + start;
      T* out = static_cast<T*>(p.output) + p.output_rows.offset(row) + start;
      for_lanes(n - start < kPiece ? n - start : kPiece, [&](int64_t i, int count) {
        store(out + i, act_and_mul<T, Act>(load(in + i, count), load(in + n + i, count)), count);
      });
    }
  });
}

// float64 variant, which gradient checks use.
template <template <typename> class Act>
void act_and_mul_float64(const ActAndMulParams& p) {
  using L = Lanes<double>;
  const int64_t n = p.out_size;
  parallel_rows(p.num_rows, 3 * n * static_cast<int64_t>(sizeof(double)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const double* in = static_cast<const double*>(p.input) + p.input_rows.offset(row);
      double* out = static_cast<double*>(p.output) + p.output_rows.offset(row);
      for_lanes_of<L>(n, [&](int64_t i, int count) {
        const vdouble x = L::load(in + i, count), y = L::load(in + n + i, count);
        L::store(out + i, Act<VectorMath<vdouble, double>>::apply(x, y), count);
      });
    }
  });
}

}  // namespace flashinfer::cpu
