// Thresholds on the CPU: the largest v whose elements >= v suffice, by count or by sum. Also the threshold of
// top-k.
//
// Two pivots from a sample split the elements. The part that holds v is split again until few elements are
// left to sort.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include <flashinfer/cpu/sampling/row.h>

namespace flashinfer::cpu {

// Append the lanes inside [low, high] to `to`, which has room for a vector, and return their number.
#if defined(FLASHINFER_AVX512)
inline int append_within(float* to, vfloat value, float low, float high) {
  const __m512 x = (__m512)value;
  const __mmask16 reach = _mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_GE_OQ);
  const __mmask16 bits = _mm512_mask_cmp_ps_mask(reach, x, _mm512_set1_ps(high), _CMP_LE_OQ);
  store(to, (vfloat)_mm512_maskz_compress_ps(bits, x));
  return __builtin_popcount(bits);
}
#else
inline int append_within(float* to, vfloat value, float low, float high) {
  const vint mask = (value >= low) & (value <= high);
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) to[count] = value[lane], count -= mask[lane];
  return count;
}
#endif

// Gather the elements of [from, from + n) inside [low, high] into `to`, which has room for n + kLanes.
inline int64_t gather(const float* from, int64_t n, float low, float high, float* to) {
  int64_t count = 0;
  for_lanes(n, [&](int64_t i, int lanes) {
    vfloat x = load(from + i, lanes);
    for (int lane = lanes; lane < kLanes; ++lane) x[lane] = NAN;
    count += append_within(to + count, x, low, high);
  });
  return count;
}

// Number or sum of the elements above `high`, and of those at or above `low`.
struct Measure {
  double above, at_least;
};

template <bool kMass>
Measure measure(const float* x, int64_t n, float high, float low) {
  Measure result{};
  for (int64_t start = 0; start < n; start += 2048) {
    const int64_t count = std::min<int64_t>(n - start, 2048);
    vfloat above{}, at_least{};
    for_lanes(count, [&](int64_t i, int lanes) {
      vfloat v = load(x + start + i, lanes);
      for (int lane = lanes; lane < kLanes; ++lane) v[lane] = NAN;
      const vfloat weight = kMass ? v : splat(1);
      above += select(v > high, weight, vfloat{}), at_least += select(v >= low, weight, vfloat{});
    });
    result.above += sum(above), result.at_least += sum(at_least);
  }
  return result;
}

// Return two elements that probably bound v, from a sorted sample: around the point where its own measure
// passes `share`.
template <bool kMass>
std::pair<float, float> guess(const float* x, int64_t n, double share, bool single) {
  constexpr int kSample = 64, kMargin = 4;
  float sample[kSample];
  for (int i = 0; i < kSample; ++i) sample[i] = x[static_cast<int64_t>((i + 0.5) * n / kSample)];
  std::sort(sample, sample + kSample, [](float a, float b) { return a > b; });
  double total = 0, sum = 0;
  for (const float v : sample) total += kMass ? v : 1;
  int at = 0;
  while (at < kSample - 1 && (sum += kMass ? sample[at] : 1) < share * total) ++at;
  if (single) return {sample[at], sample[at]};
  return {sample[std::max(at - kMargin, 0)], sample[std::min(at + kMargin, kSample - 1)]};
}

// A threshold and the number of elements equal to it.
struct Edge {
  float value;
  int64_t count;
};

// Return the threshold among n elements without NaN, and overwrite x, which has room for n + kLanes. Return
// the smallest element if all of them do not suffice, and `none` without elements.
template <bool kMass>
Edge select_sorted(float* x, int64_t n, double target, double have, float none) {
  std::sort(x, x + n, [](float a, float b) { return a > b; });
  for (int64_t i = 0, first = 0; i < n; ++i) {
    have += kMass ? x[i] : 1;
    if (i + 1 < n && x[i + 1] == x[i]) continue;
    if (have >= target || i + 1 == n) return {x[i], i + 1 - first};
    first = i + 1;
  }
  return {none, 0};
}

// `all` is the measure of the current elements, `have` that of the elements above them.
template <bool kMass>
Edge select_threshold(float* x, int64_t n, double target, double all, float none) {
  constexpr int64_t kFew = 96;
  double have = 0;
  for (bool single = false; n > kFew;) {
    const auto [high, low] = guess<kMass>(x, n, (target - have) / all, single);
    const Measure part = measure<kMass>(x, n, high, low);
    const int64_t before = n;
    if (have + part.above >= target) {
      n = gather(x, n, std::nextafter(high, INFINITY), INFINITY, x);
      all = part.above;
    } else if (have + part.at_least >= target) {
      if (high == low) {
        const Measure equal = measure<false>(x, n, high, low);
        return {high, static_cast<int64_t>(equal.at_least - equal.above)};
      }
      n = gather(x, n, low, high, x);
      have += part.above, all = part.at_least - part.above;
    } else {
      n = gather(x, n, -INFINITY, std::nextafter(low, -INFINITY), x);
      have += part.at_least, all -= part.at_least;
    }
    single = n == before;
  }
  return select_sorted<kMass>(x, n, target, have, none);
}

// Return a number that probably few more than k elements reach, from a sample of each chunk.
inline float reached_by_few(const Row& row, int64_t k, float* sample, float least) {
  int64_t count = 0;
  for (int64_t c = 0; (c + 1) * kSumChunk <= row.n; ++c)
    count += gather(row.chunk(c) + c * kLanes % kSumChunk, kLanes, least, INFINITY, sample + count);
  const double all = static_cast<double>(count), mean = all * static_cast<double>(k) / static_cast<double>(row.n);
  return select_threshold<false>(sample, count, mean + 3 * std::sqrt(mean) + 3, all, least).value;
}

// Gather the elements of a row from `low` to `high` and return their number.
inline int64_t gather_within(const Row& row, float low, float high, Floats& buffer) {
  int64_t count = 0;
  for (int64_t c = 0; c < row.chunks(); ++c) {
    if (!(row.maxima[c] >= low)) continue;
    const int64_t size = std::min<int64_t>(row.n - c * kSumChunk, kSumChunk);
    count += gather(row.chunk(c), size, low, high, &buffer[count]);
  }
  return count;
}

// Return the k-th largest number of the elements >= `least`, or `least` if there are fewer than k.
inline float top_k_threshold(const Row& row, int64_t k, Floats& buffer, float least) {
  buffer.resize(row.x.size() + kLanes);
  float low = least;
  if (2 * k <= row.chunks()) {  // k chunks have an element as large as the k-th largest of their maxima
    std::copy(row.maxima.begin(), row.maxima.end(), buffer.begin());
    std::nth_element(buffer.begin(), buffer.begin() + (k - 1), buffer.begin() + row.chunks(), std::greater<float>());
    low = buffer[k - 1];
  } else if (row.n >= 64 * kSumChunk && 8 * k < row.n) {
    low = reached_by_few(row, k, buffer.data(), least);
  }
  int64_t count = gather_within(row, low, INFINITY, buffer);
  if (count < k && low > least) count = gather_within(row, least, INFINITY, buffer);
  return select_threshold<false>(buffer.data(), count, static_cast<double>(k), static_cast<double>(count), least).value;
}

}  // namespace flashinfer::cpu
