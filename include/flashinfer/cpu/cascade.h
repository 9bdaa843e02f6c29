// Merges of attention states on the CPU. lse and weights are computed in double, elements in float.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <flashinfer/common/cascade.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

// Return 2^(s - top), or 0 for an empty state, even if all are empty and top is -inf.
inline double weight_of(double s, double top) { return s == kEmpty ? 0.0 : s == top ? 1.0 : std::exp2(s - top); }

// Return a weight's share of the total; an empty state has share 0, even if all states are empty.
inline float share_of(double weight, double total) { return weight == 0 ? 0.0f : static_cast<float>(weight / total); }

inline float merged_lse(double top, double total) {
  return static_cast<float>(total == 0 ? kEmpty : top + std::log2(total));
}

template <typename T>
void merge_state(const MergeStateParams& p) {
  parallel_rows(
      p.seq_len * p.num_heads, 3 * p.head_dim * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          const int64_t seq = row / p.num_heads, head = row % p.num_heads;
          if (p.mask && !p.mask[seq]) continue;
          const T *a = p.a.row<const T>(seq, head), *b = p.b.row<const T>(seq, head);
          T* out = p.out.row<T>(seq, head);
          const double s_a = *p.a.lse(seq, head), s_b = *p.b.lse(seq, head), top = s_a > s_b ? s_a : s_b;
          const double a_weight = weight_of(s_a, top), b_weight = weight_of(s_b, top), total = a_weight + b_weight;
          *p.out.lse(seq, head) = merged_lse(top, total);
          const float a_share = share_of(a_weight, total), b_share = share_of(b_weight, total);
          for_lanes(p.head_dim, [&](int64_t i, int count) {
            // A share of 0 skips the element, which may be NaN or infinite.
            vfloat sum{};
            if (a_share != 0) sum += load(a + i, count) * a_share;
            if (b_share != 0) sum += load(b + i, count) * b_share;
            store(out + i, sum, count);
          });
        }
      });
}

// Add to a sum of any number of terms. For float results, rounding errors accumulate separately (compensated
// summation): those of forty terms would show.
template <typename T>
inline void add(vfloat& sum, vfloat& lost, vfloat term) {
  const vfloat next = sum + term;
  if constexpr (sizeof(T) == sizeof(float)) {
    const vfloat added = next - sum;
    lost += (sum - (next - added)) + (term - added);
  }
  sum = next;
}

template <typename T>
void merge_states(const MergeStatesParams& p) {
  const int64_t row_bytes = (p.num_states + 1) * p.head_dim * static_cast<int64_t>(sizeof(T));
  parallel_rows(p.seq_len * p.num_heads, row_bytes, [&](int64_t first, int64_t last) {
    std::vector<double> weights(p.num_states);
    std::vector<vfloat> sums((p.head_dim + kLanes - 1) / kLanes), lost(sums.size());
    for (int64_t row = first; row < last; ++row) {
      const int64_t seq = row / p.num_heads, head = row % p.num_heads;
      const float* s = p.in.lse(seq, head);
      double top = kEmpty, total = 0;
      for (int64_t i = 0; i < p.num_states; ++i) top = s[i * p.s_state] > top ? s[i * p.s_state] : top;
      for (int64_t i = 0; i < p.num_states; ++i) total += weights[i] = weight_of(s[i * p.s_state], top);
      *p.out.lse(seq, head) = merged_lse(top, total);
      std::fill(sums.begin(), sums.end(), vfloat{});
      std::fill(lost.begin(), lost.end(), vfloat{});
      for (int64_t i = 0; i < p.num_states; ++i) {
        const float share = share_of(weights[i], total);
        if (share == 0) continue;
        const T* v = p.in.row<const T>(seq, head) + i * p.v_state;
        for_lanes(p.head_dim, [&](int64_t at, int count) {
          add<T>(sums[at / kLanes], lost[at / kLanes], load(v + at, count) * share);
        });
      }
      T* out = p.out.row<T>(seq, head);
      for_lanes(p.head_dim, [&](int64_t at, int count) {
        const vfloat sum = sums[at / kLanes], rest = lost[at / kLanes];
        store(out + at, sum + select(rest == rest, rest, vfloat{}), count);  // NaN next to an infinite sum
      });
    }
  });
}

}  // namespace flashinfer::cpu
