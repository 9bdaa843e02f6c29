// Rotary embedding on the CPU: a token at a time per thread, with its cosines and sines computed once for all
// heads. Equations: common/rope.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/rope.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

// Check the values of the index tensors before the first write.
inline void check_positions(const RopeParams& p) {
  if (p.with_cache) {
    for (int64_t token = 0; token < p.num_tokens; ++token) {
      const int64_t position = p.pos_ids[token];
      if (position >= 0 && position < p.cache_size) continue;
      throw_value_error("apply_rope_with_cos_sin_cache: positions: got " + std::to_string(position) + " for token " +
                        std::to_string(token) + ", wanted one below the cache's size of " +
                        std::to_string(p.cache_size));
    }
  } else if (p.with_requests) {
    int64_t last = 0;
    for (int64_t request = 0; request <= p.num_requests; ++request) {
      const int64_t start = p.indptr[request];
      if ((request == 0 ? start == 0 : start >= last) && start <= p.num_tokens) {
        last = start;
        continue;
      }
      throw_value_error("apply_rope: indptr: got " + std::to_string(start) + " at " + std::to_string(request) +
                        ", wanted 0 first, no fall, and at most the number of tokens, " + std::to_string(p.num_tokens));
    }
  }
}

// Cosines and sines of one token, in float, or in double for float64. Interleaved, each stands twice, with
// the first sine negative, as the elements of a pair need them.
template <typename S>
struct Angles {
  S cos[2 * kMaxRotaryPairs], sin[2 * kMaxRotaryPairs];

  Angles(const RopeParams& p, int64_t token) {
    const int64_t pairs = p.rotary_dim / 2, position = p.position(token);
    if (p.with_cache && pairs > 0) {  // an empty cache has no memory
      const float* row = p.cos_sin_cache + position * p.cache_stride;
      std::copy(row, row + pairs, cos);
      std::copy(row + pairs, row + 2 * pairs, sin);
    } else {
      compute(p.quarters, pairs, static_cast<double>(position));
    }
    for (int64_t i = p.inverse ? pairs - 1 : -1; i >= 0; --i) sin[i] = -sin[i];
    for (int64_t i = p.interleave ? pairs - 1 : -1; i >= 0; --i) {
      cos[2 * i + 1] = cos[2 * i] = cos[i];
      const S value = sin[i];
      sin[2 * i + 1] = value, sin[2 * i] = -value;
    }
  }

 private:
  void compute(const double* quarters, int64_t pairs, double where) {
    static_assert(kMaxRotaryPairs % kLanes == 0, "the table holds whole vectors");
    if constexpr (std::is_same_v<S, float>) {
      for (int64_t i = 0; i < pairs; i += kLanes) {
        const SinCos both = sincos_quarters(
            {load_raw<vdouble>(quarters + i) * where, load_raw<vdouble>(quarters + i + kWideLanes) * where});
        store(cos + i, both.cos);
        store(sin + i, both.sin);
      }
    } else {
      for (int64_t i = 0; i < pairs; ++i) {
        const double turns = quarters[i] * where / 4, rest = (turns - std::nearbyint(turns)) * 2 * M_PI;
        cos[i] = std::cos(rest), sin[i] = std::sin(rest);
      }
    }
  }
};

// float64 variant, which gradient checks use.
inline void rotate(const RopeParams& p, const Angles<double>& angles, const double* in, double* out) {
  const int64_t pairs = p.rotary_dim / 2, step = p.interleave ? 2 : 1, apart = p.interleave ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const double a = in[i * step], b = in[i * step + apart];
    const double c = angles.cos[i * step], s = angles.sin[i * step + (p.interleave ? 1 : 0)];
    out[i * step] = a * c - b * s;
    out[i * step + apart] = b * c + a * s;
  }
  if (!p.in_place) std::copy(in + p.rotary_dim, in + p.head_dim, out + p.rotary_dim);
}

template <typename T>
void rotate(const RopeParams& p, const Angles<float>& angles, const T* in, T* out) {
  const int64_t pairs = p.rotary_dim / 2;
  if (p.interleave) {
    for_lanes(p.rotary_dim, [&](int64_t i, int count) {
      const vfloat x = load(in + i, count);
      store(out + i, x * load(angles.cos + i, count) + swap_pairs(x) * load(angles.sin + i, count), count);
    });
  } else {
    for_lanes(pairs, [&](int64_t i, int count) {
      const vfloat a = load(in + i, count), b = load(in + pairs + i, count);
      const vfloat c = load(angles.cos + i, count), s = load(angles.sin + i, count);
      store(out + i, a * c - b * s, count);
      store(out + pairs + i, b * c + a * s, count);
    });
  }
  if (!p.in_place) std::memcpy(out + p.rotary_dim, in + p.rotary_dim, (p.head_dim - p.rotary_dim) * sizeof(T));
}

template <typename T>
void rope(const RopeParams& p) {
  check_positions(p);
  const int64_t bytes = 2 * (p.q.heads + p.k.heads) * p.head_dim * static_cast<int64_t>(sizeof(T));
  parallel_rows(p.num_tokens, bytes, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const Angles<std::conditional_t<std::is_same_v<T, double>, double, float>> angles(p, token);
      for (const RopeHeads* side : {&p.q, &p.k}) {
        const T* in = static_cast<const T*>(side->input) + token * side->input_token_stride;
        T* out = static_cast<T*>(side->output) + token * side->output_token_stride;
        for (int64_t head = 0; head < side->heads; ++head) {
          rotate(p, angles, in + head * side->input_head_stride, out + head * side->output_head_stride);
        }
      }
    }
  });
}

}  // namespace flashinfer::cpu
