// Activation functions, written once for every backend, and the parameters of their kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

// out = act(input[..., :n]) * input[..., n:], n = out_size.
struct ActAndMulParams {
  const void* input;
  void* output;
  Rows input_rows, output_rows;
  int64_t num_rows;
  int64_t out_size;
  DType dtype;
};

struct Launch;
void act_and_mul(const ActAndMulParams& params, const Launch& launch);

// apply(x, factor) is act(x) * factor, and slope(x, factor) is act'(x) * factor.
//
// The functions are templates over `Math`, a backend's arithmetic on one number or on a vector of numbers:
//   Math::V                 the number or vector
//   Math::S                 its scalar type
//   exp(x)                  for x in [-kMaxHalfExponent, 0]
//   divide(a, b)            for b from 1 to 10
//   select_less(a, b, x, y) x if a < b, y if not or if one is NaN
//   abs(x)
//   kMaxHalfExponent        the largest x whose exp(-x) is a normal number, or far below any float32
//
// A tail like silu(-100) = -100 e^-100 underflows before its product with a large factor does. Therefore the
// exponential takes half the exponent. It is multiplied twice, the second time after the factor. Arguments
// below that range are clamped to its end, where every result is zero: act(-inf) is -0, not NaN.

template <typename Math>
struct ActivationBase {
  using V = typename Math::V;
  using S = typename Math::S;

  static FLASHINFER_HD V constant(double value) { return V{} + static_cast<S>(value); }
  static FLASHINFER_HD V at_least(V x, double bound) {
    return Math::select_less(x, constant(bound), constant(bound), x);
  }
  static FLASHINFER_HD V at_most(V x, double bound) {
    return Math::select_less(x, constant(bound), x, constant(bound));
  }

  // Clamp x to [-bound, bound]; NaN stays NaN.
  static FLASHINFER_HD V within(V x, double bound) {
    return Math::select_less(constant(bound), x, constant(bound), at_least(x, -bound));
  }

  // Return x * sigmoid(v) * factor, for v with the sign of x.
  static FLASHINFER_HD V sigmoid_gate(V x, V v, V factor) {
    const V root = Math::exp(at_most(Math::abs(v), 2.0 * Math::kMaxHalfExponent) * static_cast<S>(-0.5));
    const V half = Math::select_less(
        x, V{}, root, constant(1.0));  // sigmoid(v) = root^2 / (1 + root^2) if v < 0, else 1 / (1 + root^2)
    return Math::divide(x * half, root * root + static_cast<S>(1)) * factor * half;
  }

  // Return factor * d/dx [x sigmoid(v)] = factor * sigmoid(v) * (1 + t sigmoid(-v)), with t = x dv/dx.
  static FLASHINFER_HD V sigmoid_gate_slope(V v, V t, V factor) {
    const V root = Math::exp(at_most(Math::abs(v), 2.0 * Math::kMaxHalfExponent) * static_cast<S>(-0.5));
    const V tail = root * root, whole = tail + static_cast<S>(1), one = constant(1.0);
    const V rest = Math::divide(Math::select_less(v, V{}, one, tail), whole);
    const V half = Math::select_less(v, V{}, root, one);
    return Math::divide((t * rest + static_cast<S>(1)) * half, whole) * factor * half;
  }
};

// x / (1 + e^-x)
template <typename Math>
struct Silu : ActivationBase<Math> {
  using Base = ActivationBase<Math>;
  using V = typename Math::V;

  static FLASHINFER_HD V apply(V x, V factor) {
    x = Base::at_least(x, -2.0 * Math::kMaxHalfExponent);
    return Base::sigmoid_gate(x, x, factor);
  }

  static FLASHINFER_HD V slope(V x, V factor) {
    x = Base::within(x, 2.0 * Math::kMaxHalfExponent);
    return Base::sigmoid_gate_slope(x, x, factor);
  }
};

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <typename Math>
struct GeluTanh : ActivationBase<Math> {
  using Base = ActivationBase<Math>;
  using V = typename Math::V;
  using S = typename Math::S;

  static FLASHINFER_HD V apply(V x, V factor) {
    x = Base::at_least(x, -kEnd);
    return Base::sigmoid_gate(x, twice_u(x), factor);
  }

  static FLASHINFER_HD V slope(V x, V factor) {
    x = Base::within(x, kEnd);
    const V t = x * (x * x * static_cast<S>(3 * kScale * 0.044715) + static_cast<S>(kScale));
    return Base::sigmoid_gate_slope(twice_u(x), t, factor);
  }

 private:
  static constexpr double kScale = 1.5957691216057308;                        // 2 sqrt(2 / pi)
  static constexpr double kEnd = Math::kMaxHalfExponent > 100 ? 20.0 : 13.0;  // 2 u is 602 and 177 at these ends

  static FLASHINFER_HD V twice_u(V x) {
    return x * (x * x * static_cast<S>(kScale * 0.044715) + static_cast<S>(kScale));
  }
};

// x * Phi(x) = x / 2 * erfc(-x / sqrt(2)), with the normal distribution function Phi.
//
// For negative x, Phi(x) = e^(-x^2 / 2) * tail(-x) without cancellation. tail(z) = erfc(z / sqrt(2)) e^(z^2 /
// 2) / 2 falls from 1/2 to 1 / (z sqrt(2 pi)). It equals t P(t) with t = 1 / (1 + c z). The polynomials P
// below interpolate it at Chebyshev nodes. Their relative error is 3e-6 for z <= 18.5 (half types) and 5e-9
// for z <= 27 (float32).
template <typename Math>
struct Gelu : ActivationBase<Math> {
  using Base = ActivationBase<Math>;
  using V = typename Math::V;
  using S = typename Math::S;

  static FLASHINFER_HD V apply(V x, V factor) {
    x = Base::at_least(x, -kEnd);
    const V z = Base::at_most(Math::abs(x), kEnd);
    const V root = Math::exp(z * z * static_cast<S>(-0.25));
    const V tail = root * upper_tail(z);
    const V one = Base::constant(1.0);
    return x * Math::select_less(x, V{}, tail, one - root * tail) * factor * Math::select_less(x, V{}, root, one);
  }

  // Return factor * (Phi(x) + x phi(x)), with the density phi(x) = e^(-x^2 / 2) / sqrt(2 pi).
  static FLASHINFER_HD V slope(V x, V factor) {
    x = Base::within(x, kEnd);
    const V z = Math::abs(x), root = Math::exp(z * z * static_cast<S>(-0.25));
    const V tail = upper_tail(z), rise = x * static_cast<S>(0.3989422804014327), one = Base::constant(1.0);
    const V half = Math::select_less(x, V{}, root, one);
    return Math::select_less(x, V{}, root * (tail + rise), one + root * root * (rise - tail)) * factor * half;
  }

 private:
  static constexpr double kEnd = sizeof(S) == 8 ? 27.0 : 18.5;

  static FLASHINFER_HD V upper_tail(V z) {
    if constexpr (sizeof(S) == 8) {
      constexpr S kP[] = {0.11170425626589513,  0.11169196467708935,  0.10308046647861858,   0.084683980700147196,
                          0.063028080276682497, 0.035998500112958243, -0.012793488977664601, 0.062770588662775406,
                          -0.11314466458476992, 0.066495147737893584, -0.013514832527129629};
      return polynomial(kP, z * static_cast<S>(0.28) + static_cast<S>(1));
    } else {
      constexpr S kP[] = {0.151607371f, 0.15126261f,   0.134029346f, 0.0593136552f,
                          0.115332374f, -0.160655311f, 0.0491111494f};
      return polynomial(kP, z * static_cast<S>(0.38) + static_cast<S>(1));
    }
  }

  template <int kSize>
  static FLASHINFER_HD V polynomial(const S (&coefficients)[kSize], V inverse) {
    const V t = Math::divide(Base::constant(1.0), inverse);
    V sum = V{} + coefficients[kSize - 1];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = kSize - 2; i >= 0; --i) sum = sum * t + coefficients[i];
    return sum * t;
  }
};

}  // namespace flashinfer
