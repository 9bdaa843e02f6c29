// Rows on the CPU: loaded as x >= 0 in float, with sums of chunks in the order of common/fixed_sum.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <flashinfer/common/sampling.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

// Sums of elements `kApart` apart: value(i) gives kLanes elements from i on.
template <int kApart, typename F>
inline vfloat halved(const F& value, int i) {
  if constexpr (kApart == kSumChunk) {
    return value(i);
  } else {
    return halved<2 * kApart>(value, i) + halved<2 * kApart>(value, i + kApart);
  }
}

inline float halved(vfloat value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int apart = kLanes / 2; apart > 0; apart /= 2)
    for (int i = 0; i < apart; ++i) lanes[i] += lanes[i + apart];
  return lanes[0];
}

template <typename F>
inline float chunk_sum(const F& value) {
  return halved(halved<kLanes>(value, 0));
}

inline float largest(vfloat value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
  return result;
}

// What is summed and searched: elements in float, padded with 0 to whole chunks, and each chunk's sum and maximum.
struct Row {
  std::vector<float> x, sums, maxima;
  int64_t n = 0;

  void resize(int64_t size) {
    n = size;
    const size_t chunks = num_chunks(size);
    x.resize(chunks * kSumChunk), sums.resize(chunks), maxima.resize(chunks);
  }
  int64_t chunks() const { return static_cast<int64_t>(sums.size()); }
  float* chunk(int64_t c) { return &x[c * kSumChunk]; }
  const float* chunk(int64_t c) const { return &x[c * kSumChunk]; }
};

// Sums of a row's chunks as integers. Not valid: a NaN, no mass, or more than a float can hold.
struct Mass {
  FixedPoint fixed{1, 1};
  uint64_t total = 0;
  bool valid = false;

  static Mass of(const std::vector<float>& sums) {
    float most = 0;
    bool valid = true;
    for (const float sum : sums) valid &= sum <= 3.4028234663852886e38f, most = sum > most ? sum : most;
    if (!valid || most == 0) return {};
    return of(sums, FixedPoint::of(most));
  }
  static Mass of(const std::vector<float>& sums, FixedPoint fixed) {
    Mass mass{fixed, 0, true};
    for (const float sum : sums) mass.total += fixed(sum);
    return mass;
  }
  double real() const { return fixed.real(total); }
};

// Elements of one type, read and written as floats.
struct Format {
  int64_t size;
  void (*read)(const void* from, int64_t at, int64_t count, float* to);
  void (*write)(void* to, int64_t at, int64_t count, const float* from);

  template <typename T>
  static Format of() {
    return {sizeof(T),
            [](const void* from, int64_t at, int64_t count, float* to) {
              for_lanes(count, [&](int64_t i, int lanes) {
                store(to + i, load(static_cast<const T*>(from) + at + i, lanes), lanes);
              });
            },
            [](void* to, int64_t at, int64_t count, const float* from) {
              for_lanes(count, [&](int64_t i, int lanes) {
                store(static_cast<T*>(to) + at + i, load(from + i, lanes), lanes);
              });
            }};
  }
};

// A row as the caller has it.
struct Source {
  const void* data;  // of element 0
  DType dtype;
  const Format* format;
  int64_t n;

  static Source of(const RowsOf& rows, int64_t offset, const Format& format, int64_t n) {
    return {static_cast<const char*>(rows.data) + offset * format.size, rows.dtype, &format, n};
  }
  int64_t count(int64_t c) const { return std::min<int64_t>(n - c * kSumChunk, kSumChunk); }

  // A chunk in float, padded to kSumChunk elements: where it lies, or in `buffer`.
  const float* chunk(int64_t c, float padding, float* buffer) const {
    const int64_t size = count(c), at = c * kSumChunk;
    if (dtype == DType::kFloat32 && size == kSumChunk) return static_cast<const float*>(data) + at;
    format->read(data, at, size, buffer);
    std::fill(buffer + size, buffer + kSumChunk, padding);
    return buffer;
  }
  float at(int64_t i) const {
    float value;
    format->read(data, i, 1, &value);
    return value;
  }
};

template <typename Body>
inline void for_chunks(const Source& from, float padding, const Body& body) {
  float buffer[kSumChunk];
  for (int64_t c = 0; c * kSumChunk < from.n; ++c) body(c, from.chunk(c, padding, buffer));
}

// Elements as they are, without sums; maxima are those of numbers.
inline void load_elements(Row& row, const Source& from) {
  row.resize(from.n);
  for_chunks(from, -INFINITY, [&](int64_t c, const float* at) {
    float* to = row.chunk(c);
    vfloat most = splat(-INFINITY);
    for (int i = 0; i < kSumChunk; i += kLanes) {
      const vfloat x = load(at + i);
      store(to + i, x);
      most = select(x > most, x, most);
    }
    row.maxima[c] = largest(most);
  });
}

// Probabilities: what is negative counts as 0, NaN stays.
inline void load_probs(Row& row, const Source& from) {
  row.resize(from.n);
  for_chunks(from, 0.0f, [&](int64_t c, const float* at) {
    float* to = row.chunk(c);
    vfloat most{};
    row.sums[c] = chunk_sum([&](int i) {
      const vfloat x = max(splat(0), load(at + i));
      store(to + i, x);
      most = max(most, x);
      return x;
    });
    row.maxima[c] = largest(most);
  });
}

// The sums alone, for those who need no threshold.
inline void sum_probs(std::vector<float>& sums, const Source& from) {
  sums.resize(num_chunks(from.n));
  for_chunks(from, 0.0f, [&](int64_t c, const float* at) {
    sums[c] = chunk_sum([&](int i) { return max(splat(0), load(at + i)); });
  });
}

// exp((l - max l) / T); softmax is that, normalised.
inline void load_exponentials(Row& row, const Source& from, double temperature) {
  row.resize(from.n);
  vfloat most = splat(-INFINITY);
  for_chunks(from, -INFINITY, [&](int64_t, const float* at) {
    for (int i = 0; i < kSumChunk; i += kLanes) most = max(most, load(at + i));
  });
  const float top = largest(most), scale = exponent_scale(temperature);
  for_chunks(from, -INFINITY, [&](int64_t c, const float* at) {
    float* to = row.chunk(c);
    row.sums[c] = chunk_sum([&](int i) {
      const vfloat e = exp2((load(at + i) - top) * scale);
      store(to + i, e);
      return e;
    });
  });
}

// Every x is replaced by f(x), which keeps 0.
template <typename F>
void rewrite(Row& row, const F& f) {
  for (int64_t c = 0; c < row.chunks(); ++c) {
    float* at = row.chunk(c);
    vfloat most{};
    row.sums[c] = chunk_sum([&](int i) {
      const vfloat x = f(load(at + i));
      store(at + i, x);
      most = max(most, x);
      return x;
    });
    row.maxima[c] = largest(most);
  }
}

inline vfloat normalized(vfloat x, Normalizer by) { return x * by.up * by.inverse; }

// softmax(l / T) in float, or a row with a NaN.
inline bool load_softmax(Row& row, const Source& from, double temperature) {
  load_exponentials(row, from, temperature);
  const Mass mass = Mass::of(row.sums);
  if (!mass.valid) return false;
  const Normalizer by = Normalizer::of(mass.real());
  rewrite(row, [&](vfloat x) { return normalized(x, by); });
  return true;
}

// Where x < t: 0.
inline vfloat kept(vfloat x, float t) { return select(x >= t, x, vfloat{}); }

inline void sum_kept(const Row& row, float t, std::vector<float>& sums) {
  sums.resize(row.sums.size());
  for (int64_t c = 0; c < row.chunks(); ++c) {
    const float* at = row.chunk(c);
    sums[c] = row.maxima[c] < t ? 0.0f : chunk_sum([&](int i) { return kept(load(at + i), t); });
  }
}

}  // namespace flashinfer::cpu
