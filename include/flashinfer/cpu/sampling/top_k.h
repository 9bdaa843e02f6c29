// The k largest elements of each row on the CPU, in the order of their indices.
#pragma once

#include <flashinfer/cpu/sampling/sample.h>

namespace flashinfer::cpu {

// Pick all elements above the threshold, then the first ones equal to it, then NaN, which counts as the
// smallest.
inline void pick_top_k(const Row& row, float t, int64_t k, float* values, int64_t* indices) {
  const auto each = [&](const auto& f) {
    for (int64_t c = 0; c < row.chunks(); ++c) {
      const float* at = row.chunk(c);
      if (row.maxima[c] < t && !row.has_nan) continue;
      for_lanes(std::min<int64_t>(row.n - c * kSumChunk, kSumChunk), [&](int64_t i, int lanes) {
        if (any(~(load(at + i, lanes) < t)))
          for (int lane = 0; lane < lanes; ++lane) f(at[i + lane], c * kSumChunk + i + lane);
      });
    }
  };
  int64_t above = 0, equal = 0, count = 0;
  each([&](float x, int64_t) { above += x > t, equal += x == t; });
  int64_t ties = std::min(equal, k - above), nan = k - above - ties;
  each([&](float x, int64_t i) {
    if (count < k && (x > t || (x == t && ties-- > 0) || (x != x && nan-- > 0)))
      values[count] = x, indices[count++] = i;
  });
}

inline void top_k_rows(const TopKParams& p, const Format& format) {
  parallel_rows(p.num_rows, p.vocab_size * format.size, [&](int64_t first, int64_t last) {
    Drawable& d = own_drawable();
    std::vector<float> values(p.k);
    for (int64_t r = first; r < last; ++r) {
      const Source from = Source::of(p.input, r * p.input.stride, format, p.vocab_size);
      load_elements(d.row, from);
      const float t = p.k < p.vocab_size ? top_k_threshold(d.row, p.k, d.buffer, -INFINITY) : -INFINITY;
      pick_top_k(d.row, t, p.k, values.data(), p.indices + r * p.k);
      format.write(p.values, r * p.k, p.k, values.data());
    }
  });
}

}  // namespace flashinfer::cpu
