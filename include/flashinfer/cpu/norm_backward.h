// Gradients of RMSNorm and LayerNorm on the CPU: a part of the rows per thread. Each row is read a second
// time from the L1 cache. Equations: common/norm_backward.h.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include <flashinfer/common/norm_backward.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>

namespace flashinfer::cpu {

// Depends on the shape only: the number of threads would change the order of sums.
inline int64_t norm_backward_parts(int64_t num_rows, int64_t hidden_size) {
  constexpr int64_t kMaxParts = 64;
  const int64_t min_rows = 1 + kGrainBytes / (hidden_size < 1 ? 1 : hidden_size) / 8;
  const int64_t parts = (num_rows + min_rows - 1) / min_rows;
  return parts < kMaxParts ? parts : kMaxParts;
}

// Call body(row, sums) for the rows of every part, with the part's `arrays * n` sums, zero at first.
template <typename S, typename Body>
void for_rows_of_parts(void* parts, int64_t num_parts, int64_t num_rows, int64_t size, const Body& body) {
  parallel_for(num_parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      S* sums = static_cast<S*>(parts) + part * size;
      std::fill(sums, sums + size, S(0));
      const int64_t end = num_rows * (part + 1) / num_parts;
      for (int64_t row = num_rows * part / num_parts; row < end; ++row) body(row, sums);
    }
  });
}

inline void add_to(Wide& total, vfloat terms) {
  const Wide wide = widen(terms);
  total.low += wide.low, total.high += wide.high;
}
inline void add_to(Wide& total, vdouble terms) { total.low += terms; }

// Sum over a row: add(i, count, totals) adds the terms of some elements, and every 16 vectors move to double.
// Terms of half types have few digits: if they are equal, the errors of a long float sum do not cancel.
template <typename L, size_t kSums, typename Add>
std::array<double, kSums> row_sums(int64_t n, const Add& add) {
  constexpr int64_t kPiece = 16 * L::kCount;
  std::array<Wide, kSums> wide{};
  for (int64_t start = 0; start < n; start += kPiece) {
    std::array<typename L::V, kSums> totals{};
    for_lanes_of<L>(n - start < kPiece ? n - start : kPiece,
                    [&](int64_t i, int count) { add(start + i, count, totals); });
    for (size_t s = 0; s < kSums; ++s) add_to(wide[s], totals[s]);
  }
  std::array<double, kSums> result;
  for (size_t s = 0; s < kSums; ++s) result[s] = sum(wide[s].low + wide[s].high);
  return result;
}

// Add the sums of all parts into `out`, n of them from `start` on.
template <typename S, typename W>
void sum_parts(const void* parts, int64_t num_parts, int64_t size, int64_t start, int64_t n, W* out) {
  parallel_for(n, 512, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      double total = 0;
      for (int64_t part = 0; part < num_parts; ++part) total += static_cast<const S*>(parts)[part * size + start + i];
      if constexpr (sizeof(W) == 8) {
        out[i] = total;
      } else {
        out[i] = from_float<W>(static_cast<float>(total));
      }
    }
  });
}

template <typename T>
void rms_norm_backward(const RmsNormBackwardParams& p) {
  using L = Lanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t n = p.hidden_size;
  const S offset = p.weight_offset;
  for_rows_of_parts<S>(p.parts, p.num_parts, p.num_rows, n, [&](int64_t row, S* sums) {
    const T* grad = static_cast<const T*>(p.grad) + p.grad_rows.offset(row);
    const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
    const T* more = p.grad_sum ? static_cast<const T*>(p.grad_sum) + p.grad_sum_rows.offset(row) : nullptr;
    T* out = static_cast<T*>(p.grad_input) + row * n;
    const auto [squares, products] = row_sums<L, 2>(n, [&](int64_t i, int count, std::array<V, 2>& totals) {
      const V x = L::load(in + i, count);
      totals[0] += x * x;
      totals[1] += L::load(grad + i, count) * (L::load(weight + i, count) + offset) * x;
    });
    const double size = static_cast<double>(n), root = 1 / std::sqrt(squares / size + p.eps.get());
    const S r = static_cast<S>(root), c = static_cast<S>(products / size * root * root * root);
    for_lanes_of<L>(n, [&](int64_t i, int count) {
      const V x = L::load(in + i, count), g = L::load(grad + i, count);
      V result = g * (L::load(weight + i, count) + offset) * r - x * c;
      if (more) result += L::load(more + i, count);
      L::store(out + i, result, count);
      L::store_wide(sums + i, L::load_wide(sums + i, count) + g * x * r, count);
    });
  });
  sum_parts<S>(p.parts, p.num_parts, n, 0, n, static_cast<T*>(p.grad_weight));
}

// Load gamma, which is float32 or of the element type.
template <typename L, typename W>
typename L::V load_affine(const W* from, int count) {
  if constexpr (std::is_same_v<typename L::V, vfloat>) {
    return load(from, count);
  } else {
    return Lanes<W>::load(from, count);
  }
}

template <typename T, typename W>
void layer_norm_backward(const LayerNormBackwardParams& p) {
  using L = Lanes<T>;
  using V = typename L::V;
  using S = typename L::S;
  const W* gamma = static_cast<const W*>(p.gamma);
  const int64_t n = p.hidden_size;
  const double size = static_cast<double>(n);
  for_rows_of_parts<S>(p.parts, p.num_parts, p.num_rows, 2 * n, [&](int64_t row, S* sums) {
    const T* grad = static_cast<const T*>(p.grad) + p.grad_rows.offset(row);
    const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(row);
    T* out = static_cast<T*>(p.grad_input) + row * n;
    const auto [total] =
        row_sums<L, 1>(n, [&](int64_t i, int count, std::array<V, 1>& totals) { totals[0] += L::load(in + i, count); });
    const S mean = static_cast<S>(total / size);
    const auto [squares, grads, products] = row_sums<L, 3>(n, [&](int64_t i, int count, std::array<V, 3>& totals) {
      V x = L::load(in + i, count) - mean;
      for (int lane = count; lane < L::kCount; ++lane) x[lane] = 0;
      const V g = L::load(grad + i, count) * load_affine<L>(gamma + i, count);
      totals[0] += x * x, totals[1] += g, totals[2] += g * x;
    });
    const double root = 1 / std::sqrt(squares / size + p.eps.get());
    const S r = static_cast<S>(root), a = static_cast<S>(grads / size), b = static_cast<S>(products * root / size);
    for_lanes_of<L>(n, [&](int64_t i, int count) {
      const V x = (L::load(in + i, count) - mean) * r, g = L::load(grad + i, count);
      L::store(out + i, (g * load_affine<L>(gamma + i, count) - a - x * b) * r, count);
      L::store_wide(sums + i, L::load_wide(sums + i, count) + g * x, count);
      L::store_wide(sums + n + i, L::load_wide(sums + n + i, count) + g, count);
    });
  });
  sum_parts<S>(p.parts, p.num_parts, 2 * n, 0, n, static_cast<W*>(p.grad_gamma));
  sum_parts<S>(p.parts, p.num_parts, 2 * n, n, n, static_cast<W*>(p.grad_beta));
}

}  // namespace flashinfer::cpu
