// RMSNorm and LayerNorm on the CPU: a row at a time per thread, in two passes of which the second hits the L1
// cache. Equations: common/norm.h.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include <flashinfer/common/norm.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>
#include <flashinfer/cpu/simd/math.h>
#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// Sum over a row: two(i) returns the terms of 2 * kLanes elements, one(i, count) those of the rest. Four
// independent chains are added every 4096 elements, so that the rounding error stays that of a short sum.
template <typename F2, typename F>
inline double row_sum(int64_t n, const F2& two, const F& one) {
  double total = 0;
  for (int64_t start = 0; start < n; start += 4096) {
    const int64_t end = n - start < 4096 ? n : start + 4096;
    Two chain[2] = {};
    int64_t i = start;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      for (int c = 0; c < 2; ++c) {
        const Two terms = two(i + c * 2 * kLanes);
        chain[c].first += terms.first, chain[c].second += terms.second;
      }
    }
    for (; i < end; i += kLanes) chain[0].first += one(i, static_cast<int>(end - i < kLanes ? end - i : kLanes));
    total += sum((chain[0].first + chain[1].first) + (chain[0].second + chain[1].second));
  }
  return total;
}

inline double inverse_root(double squares, int64_t n, const Scalar& eps) {
  return 1.0 / std::sqrt(squares / static_cast<double>(n) + eps.get());
}

// float64 variant, which gradient checks use: equal formulas, not optimised.
inline void rms_norm_float64(const RmsNormParams& p) {
  using L = Lanes<double>;
  const double* weight = static_cast<const double*>(p.weight);
  const int64_t n = p.hidden_size;
  parallel_rows(p.num_rows, 2 * n * static_cast<int64_t>(sizeof(double)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const double* in = static_cast<const double*>(p.input) + p.input_rows.offset(row);
      double* out = static_cast<double*>(p.output) + p.output_rows.offset(row);
      double* res = p.residual ? static_cast<double*>(p.residual) + p.residual_rows.offset(row) : nullptr;
      vdouble squares{};
      for_lanes_of<L>(n, [&](int64_t i, int count) {
        vdouble x = L::load(in + i, count);
        if (res) L::store(res + i, x += L::load(res + i, count), count);
        squares += x * x;
      });
      const double scale = inverse_root(sum(squares), n, p.eps);
      for_lanes_of<L>(n, [&](int64_t i, int count) {
        const vdouble x = L::load(res ? res + i : in + i, count);
        L::store(out + i, x * scale * (L::load(weight + i, count) + static_cast<double>(p.weight_offset)), count);
      });
    }
  });
}

inline void layer_norm_float64(const LayerNormParams& p) {
  using L = Lanes<double>;
  const int64_t n = p.hidden_size;
  const auto affine = [&](const void* values, int64_t i, int count) {
    return p.affine_is_float32 ? Lanes<float>::load(static_cast<const float*>(values) + i, count)
                               : L::load(static_cast<const double*>(values) + i, count);
  };
  parallel_rows(p.num_rows, 2 * n * static_cast<int64_t>(sizeof(double)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const double* in = static_cast<const double*>(p.input) + p.input_rows.offset(row);
      double* out = static_cast<double*>(p.output) + p.output_rows.offset(row);
      double total = 0, squares = 0;
      for (int64_t i = 0; i < n; ++i) total += in[i];
      const double mean = total / static_cast<double>(n);
      for (int64_t i = 0; i < n; ++i) squares += (in[i] - mean) * (in[i] - mean);
      const double scale = inverse_root(squares, n, p.eps);
      for_lanes_of<L>(n, [&](int64_t i, int count) {
        const vdouble x = (L::load(in + i, count) - mean) * scale;
        L::store(out + i, x * affine(p.gamma, i, count) + affine(p.beta, i, count), count);
      });
    }
  });
}

// Return x * scale * factor. float32 is computed in double, because each rounding in float could cost one
// ulp.
template <typename T>
inline vfloat scaled(vfloat x, double scale, vfloat factor) {
  if constexpr (std::is_same_v<T, float>) {
    const Wide a = widen(x), b = widen(factor);
    return narrow({a.low * scale * b.low, a.high * scale * b.high});
  }
  return x * static_cast<float>(scale) * factor;
}

// Return (x - mean) * scale * factor + term in the same precision: near the mean only its rounding would
// remain.
template <typename T>
inline vfloat shifted(vfloat x, double mean, double scale, vfloat factor, vfloat term) {
  if constexpr (std::is_same_v<T, float>) {
    const Wide a = widen(x), b = widen(factor), c = widen(term);
    return narrow({(a.low - mean) * scale * b.low + c.low, (a.high - mean) * scale * b.high + c.high});
  }
  return (x - static_cast<float>(mean)) * static_cast<float>(scale) * factor + term;
}

template <typename T>
void rms_norm(const RmsNormParams& p) {
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t n = p.hidden_size;
  const int arrays = p.residual ? 4 : 2;
  parallel_rows(p.num_rows, arrays * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    // Convert once for all rows of this thread, in the order in which load_two returns a row.
    std::vector<float> factor(n);
    for_lanes(
        n,
        [&](int64_t i) {
          const Two w = load_two(weight + i);
          store_two(&factor[i], Two{w.first + p.weight_offset, w.second + p.weight_offset});
        },
        [&](int64_t i, int count) { store(&factor[i], load(weight + i, count) + p.weight_offset, count); });
    for (int64_t row = first; row < last; ++row) {
      const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
      T* out = static_cast<T*>(p.output) + p.output_rows.offset(row);
      T* res = p.residual ? static_cast<T*>(p.residual) + p.residual_rows.offset(row) : nullptr;
      const auto two = [&](int64_t i) {
        Two x = load_two(in + i);
        if (res) {
          const Two r = load_two(res + i);
          x.first += r.first, x.second += r.second;
        }
        return x;
      };
      const auto one = [&](int64_t i, int count) {
        return res ? load(in + i, count) + load(res + i, count) : load(in + i, count);
      };
      const double squares = row_sum(
          n,
          [&](int64_t i) {
            const Two x = two(i);
            return Two{x.first * x.first, x.second * x.second};
          },
          [&](int64_t i, int count) {
            const vfloat x = one(i, count);
            return x * x;
          });
      const double scale = inverse_root(squares, n, p.eps);
      for_lanes(
          n,
          [&](int64_t i) {
            const Two x = two(i), f = load_two(&factor[i]);
            if (res) store_two(res + i, x);
            store_two(out + i, Two{scaled<T>(x.first, scale, f.first), scaled<T>(x.second, scale, f.second)});
          },
          [&](int64_t i, int count) {
            const vfloat x = one(i, count);
            if (res) store(res + i, x, count);
            store(out + i, scaled<T>(x, scale, load(&factor[i], count)), count);
          });
    }
  });
}

// Mean of a row, and the sum of the squares of deviations from it.
struct Moments {
  double mean, squares;
};

template <typename T>
inline Moments moments_of(const T* in, int64_t n) {
  const double total = row_sum(
      n, [&](int64_t i) { return load_two(in + i); }, [&](int64_t i, int count) { return load(in + i, count); });
  const double mean = total / static_cast<double>(n);
  // Squares of deviations, not the difference of two large sums: a row far from zero keeps its digits.
  const float center = static_cast<float>(mean);
  const double squares = row_sum(
      n,
      [&](int64_t i) {
        const Two x = load_two(in + i);
        return Two{(x.first - center) * (x.first - center), (x.second - center) * (x.second - center)};
      },
      [&](int64_t i, int count) {
        vfloat deviation = load(in + i, count) - center;
        for (int lane = count; lane < kLanes; ++lane) deviation[lane] = 0;
        return deviation * deviation;
      });
  return {mean, squares};
}

template <typename T, typename W>
void layer_norm(const LayerNormParams& p) {
  const W* gamma = static_cast<const W*>(p.gamma);
  const W* beta = static_cast<const W*>(p.beta);
  const int64_t n = p.hidden_size;
  parallel_rows(p.num_rows, 2 * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
      T* out = static_cast<T*>(p.output) + p.output_rows.offset(row);
      const Moments moments = moments_of(in, n);
      const double scale = inverse_root(moments.squares, n, p.eps);
      for_lanes(n, [&](int64_t i, int count) {
        const vfloat y =
            shifted<T>(load(in + i, count), moments.mean, scale, load(gamma + i, count), load(beta + i, count));
        store(out + i, y, count);
      });
    }
  });
}

}  // namespace flashinfer::cpu
