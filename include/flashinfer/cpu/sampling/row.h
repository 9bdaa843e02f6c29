// Rows on the CPU: loaded as x >= 0 in float, with sums of chunks in the order of common/fixed_sum.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <vector>

#include <flashinfer/common/sampling.h>
#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

// Sum a chunk by halving, from elements i, i + kApart, and so on. value(i) returns kLanes elements from i on.
template <int kApart, typename F>
inline vfloat tree_sum(const F& value, int i) {
  if constexpr (kApart == kSumChunk) {
    return value(i);
  } else {
    return tree_sum<2 * kApart>(value, i) + tree_sum<2 * kApart>(value, i + kApart);
  }
}

// Combine all lanes: first those kLanes / 2 apart, then kLanes / 4, and so on.
template <typename F>
inline float reduce_lanes(vfloat value, const F& combine) {
#if defined(FLASHINFER_AVX512)
  const auto swapped = [&](auto shuffle) { value = combine(value, (vfloat)shuffle((__m512)value)); };
  swapped([](__m512 x) { return _mm512_maskz_shuffle_f32x4(kAllLanes, x, x, 0x4e); });
  swapped([](__m512 x) { return _mm512_maskz_shuffle_f32x4(kAllLanes, x, x, 0xb1); });
  swapped([](__m512 x) { return _mm512_maskz_permute_ps(kAllLanes, x, 0x4e); });
  swapped([](__m512 x) { return _mm512_maskz_permute_ps(kAllLanes, x, 0xb1); });
#else
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    vfloat other = value;
    for (int i = 0; i < apart; ++i) other[i] = value[i + apart];
    value = combine(value, other);
  }
#endif
  return value[0];
}

inline float lane_sum(vfloat value) {
  return reduce_lanes(value, [](vfloat a, vfloat b) { return a + b; });
}

template <typename F>
inline float chunk_sum(const F& value) {
  return lane_sum(tree_sum<kLanes>(value, 0));
}

inline float largest(vfloat value) {
  return reduce_lanes(value, [](vfloat a, vfloat b) { return max(b, a); });
}

inline bool any(vint mask) {
#if defined(FLASHINFER_AVX512)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result |= mask[lane];
  return result != 0;
#endif
}

// Uninitialised arrays aligned to cache lines, for rows.
template <typename T>
struct Uninitialized : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Uninitialized<U>;
  };
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t{64}); }
  template <typename U>
  void construct(U*) {}
};
using Floats = std::vector<float, Uninitialized<float>>;

// A row to sum and search: elements in float, padded with 0 to whole chunks, and each chunk's sum and
// maximum. Whole chunks may stay in the caller's memory. A chunk whose sum is 0 may have any elements.
struct Row {
  Floats x;
  std::vector<float> sums, maxima;
  int64_t n = 0, borrowed_chunks = 0;
  const float* borrowed = nullptr;
  bool has_nan = false;  // of the raw elements

  void resize(int64_t size) {
    n = size, borrowed_chunks = 0;
    const size_t chunks = num_chunks(size);
    x.resize(chunks * kSumChunk), sums.resize(chunks), maxima.resize(chunks);
  }
  int64_t chunks() const { return static_cast<int64_t>(sums.size()); }
  float* own_chunk(int64_t c) { return &x[c * kSumChunk]; }
  const float* chunk(int64_t c) const { return c < borrowed_chunks ? borrowed + c * kSumChunk : &x[c * kSumChunk]; }
};

// Sum of a row: its chunk sums as integers. A row is invalid if it has a NaN, if all elements are 0, or if a
// chunk sum is infinite.
struct Mass {
  FixedPoint fixed{1, 1};
  uint64_t total = 0;
  bool valid = false;

  static Mass of(const std::vector<float>& sums) {
    float maximum = 0;
    bool valid = true;
    for (const float sum : sums) valid &= sum <= 3.4028234663852886e38f, maximum = sum > maximum ? sum : maximum;
    if (!valid || maximum == 0) return {};
    return of(sums, FixedPoint::of(maximum));
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

// A row in the caller's memory.
struct Source {
  const void* data;  // of element 0
  DType dtype;
  const Format* format;
  int64_t n;

  static Source of(const RowsOf& rows, int64_t offset, const Format& format, int64_t n) {
    return {static_cast<const char*>(rows.data) + offset * format.size, rows.dtype, &format, n};
  }
  int64_t count(int64_t c) const { return std::min<int64_t>(n - c * kSumChunk, kSumChunk); }

  // Return a chunk in float, padded to kSumChunk elements: in the caller's memory or in `buffer`.
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

// Load raw elements without sums; maxima ignore NaN.
inline void load_elements(Row& row, const Source& from) {
  row.resize(from.n);
  const bool borrows = from.dtype == DType::kFloat32;
  if (borrows) row.borrowed = static_cast<const float*>(from.data), row.borrowed_chunks = from.n / kSumChunk;
  bool has_nan = false;
  for_chunks(from, -INFINITY, [&](int64_t c, const float* at) {
    vfloat maximum = splat(-INFINITY);
    vint bits{};  // bits of the largest magnitude
    for (int i = 0; i < kSumChunk; i += kLanes) {
      const vfloat x = load(at + i);
      const vint positive = bit_cast<vint>(x) & INT32_MAX;
      maximum = max(x, maximum), bits = positive > bits ? positive : bits;
    }
    row.maxima[c] = largest(maximum), has_nan |= any(bits > 0x7f800000);
    if (c >= row.borrowed_chunks) std::copy_n(at, kSumChunk, row.own_chunk(c));
  });
  row.has_nan = has_nan;
}

// Load probabilities. Negative ones count as 0, and NaN stays. If there is no negative one, the row borrows
// the caller's memory.
inline void load_probs(Row& row, const Source& from) {
  row.resize(from.n);
  bool borrows = from.dtype == DType::kFloat32;
  row.borrowed = static_cast<const float*>(from.data);
  for_chunks(from, 0.0f, [&](int64_t c, const float* at) {
    vfloat maximum{};
    vint signs{};
    row.sums[c] = chunk_sum([&](int i) {
      const vfloat raw = load(at + i), x = max(splat(0), raw);
      signs |= bit_cast<vint>(raw);
      maximum = max(maximum, x);
      return x;
    });
    row.maxima[c] = largest(maximum);
    if (borrows && from.count(c) == kSumChunk && !any(signs < 0)) {
      ++row.borrowed_chunks;
      return;
    }
    if (borrows && from.count(c) == kSumChunk) {  // the first chunk that is copied
      for (int64_t before = 0; before < c; ++before) std::copy_n(row.chunk(before), kSumChunk, row.own_chunk(before));
      row.borrowed_chunks = 0, borrows = false;
    }
    for (int i = 0; i < kSumChunk; i += kLanes) store(row.own_chunk(c) + i, max(splat(0), load(at + i)));
  });
}

// Compute only the chunk sums, for draws without a threshold.
inline void sum_probs(std::vector<float>& sums, const Source& from) {
  sums.resize(num_chunks(from.n));
  for_chunks(from, 0.0f, [&](int64_t c, const float* at) {
    sums[c] = chunk_sum([&](int i) { return max(splat(0), load(at + i)); });
  });
}

// exp((l - max l) / T) of a chunk, and its sum.
struct Exponential {
  float top, scale;

  template <typename F>
  float operator()(const float* at, float* to, const F& change) const {
    for (int i = 0; i < kSumChunk; i += kLanes) store(to + i, exp2((change(load(at + i)) - top) * scale));
    return chunk_sum([&](int i) { return load(to + i); });
  }
};

// Write the exponentials of chunk c to to(c), which has room for kSumChunk elements, and their chunk sums.
template <typename To>
inline void exponentials(const Source& from, double temperature, std::vector<float>& sums, const To& to) {
  sums.resize(num_chunks(from.n));
  vfloat maximum = splat(-INFINITY);
  for_chunks(from, -INFINITY, [&](int64_t, const float* at) {
    vfloat own[2] = {maximum, maximum};  // a captured reference would be stored in each step
    for (int i = 0; i < kSumChunk; i += 2 * kLanes) {
      own[0] = max(own[0], load(at + i));
      own[1] = max(own[1], load(at + i + kLanes));
    }
    maximum = max(own[0], own[1]);
  });
  const Exponential exponential{largest(maximum), exponent_scale(temperature)};
  for_chunks(from, -INFINITY,
             [&](int64_t c, const float* at) { sums[c] = exponential(at, to(c), [](vfloat x) { return x; }); });
}
inline void load_exponentials(Row& row, const Source& from, double temperature) {
  row.resize(from.n);
  exponentials(from, temperature, row.sums, [&](int64_t c) { return row.own_chunk(c); });
}

// Replace every x by f(x), with f(0) = 0.
template <typename F>
void rewrite(Row& row, const F& f) {
  for (int64_t c = 0; c < row.chunks(); ++c) {
    row.maxima[c] = 0;
    if (row.sums[c] == 0) continue;
    const float* at = row.chunk(c);
    float* to = row.own_chunk(c);
    vfloat maximum{};
    row.sums[c] = chunk_sum([&](int i) {
      const vfloat x = f(load(at + i));
      store(to + i, x);
      maximum = max(maximum, x);
      return x;
    });
    row.maxima[c] = largest(maximum);
  }
  row.borrowed_chunks = 0;
}

inline vfloat normalized(vfloat x, Normalizer by) { return x * by.up * by.inverse; }

// Normalise exponentials to a softmax. Return false if there is a NaN.
inline bool normalize(Row& row) {
  const Mass mass = Mass::of(row.sums);
  if (!mass.valid) return false;
  const Normalizer by = Normalizer::of(mass.real());
  rewrite(row, [&](vfloat x) { return normalized(x, by); });
  return true;
}

// Load softmax(l / T) in float. The second form takes raw elements and drops those below `least`.
inline bool load_softmax(Row& row, const Source& from, double temperature) {
  load_exponentials(row, from, temperature);
  return normalize(row);
}
inline bool softmax_from(Row& row, float least, double temperature) {
  if (row.has_nan) return false;
  const Exponential exponential{*std::max_element(row.maxima.begin(), row.maxima.end()), exponent_scale(temperature)};
  for (int64_t c = 0; c < row.chunks(); ++c) {
    row.sums[c] = 0;
    if (row.maxima[c] < least) continue;
    row.sums[c] = exponential(row.chunk(c), row.own_chunk(c),
                              [least](vfloat x) { return select(x < least, splat(-INFINITY), x); });
  }
  row.borrowed_chunks = 0;
  return normalize(row);
}

// Return x with 0 for elements below t.
inline vfloat kept(vfloat x, float t) { return select(x >= t, x, vfloat{}); }

inline void sum_kept(const Row& row, float t, std::vector<float>& sums) {
  sums.resize(row.sums.size());
  for (int64_t c = 0; c < row.chunks(); ++c) {
    const float* at = row.chunk(c);
    sums[c] = row.maxima[c] < t || row.sums[c] == 0 ? 0.0f : chunk_sum([&](int i) { return kept(load(at + i), t); });
  }
}

}  // namespace flashinfer::cpu
