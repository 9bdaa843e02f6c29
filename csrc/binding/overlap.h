// Detection of elements that two views share.
#pragma once

#include <cstdint>
#include <utility>

#include "binding/view.h"

namespace flashinfer::binding {

namespace overlap {

inline std::pair<const char*, const char*> extent(const View& arg) {
  const char *low = static_cast<const char*>(arg.data), *high = low;
  for (int64_t i = 0; i < arg.ndim; ++i) {
    const int64_t reach = (arg.sizes[i] - 1) * arg.strides[i] * size_of(arg.dtype);
    (reach < 0 ? low : high) += reach;
  }
  return {low, high + size_of(arg.dtype)};
}

struct Step {
  int64_t stride, forward, back;  // the difference of two indices is in [-back, forward]
};

// Return true if differences of the first `count` steps, in the order of rising strides, can sum to `apart`.
// After kTries candidates for one step it gives up and returns true.
inline bool can_sum_to(const Step* steps, int count, int64_t apart) {
  if (count == 0) return apart == 0;
  const Step& step = steps[count - 1];
  int64_t forward = 0, back = 0;  // reach of the smaller steps
  for (int i = 0; i + 1 < count; ++i)
    forward += steps[i].forward * steps[i].stride, back += steps[i].back * steps[i].stride;
  constexpr int64_t kTries = 4;
  int64_t first = (apart - forward) / step.stride - 1, last = (apart + back) / step.stride + 1;
  if (first < -step.back) first = -step.back;
  if (last > step.forward) last = step.forward;
  if (last - first > kTries) return true;
  for (int64_t by = first; by <= last; ++by) {
    const int64_t rest = apart - by * step.stride;
    if (rest <= forward && rest >= -back && can_sum_to(steps, count - 1, rest)) return true;
  }
  return false;
}

// Detect interleaved views of one larger tensor that share no element: column ranges of a fused projection,
// or K and V of one paged cache. With equal strides, an element is shared if sum((i - j) * stride) == `apart`
// has a solution.
inline bool interleaved(const View& a, const View& b) {
  const int64_t width = size_of(a.dtype), apart = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
  if (a.ndim != b.ndim || a.ndim > 16 || size_of(b.dtype) != width || apart % width != 0) return false;
  Step steps[16];
  int count = 0;
  for (int64_t i = 0; i < a.ndim; ++i) {
    if (a.sizes[i] > 1 && b.sizes[i] > 1 && a.strides[i] != b.strides[i]) return false;
    const int64_t stride = a.sizes[i] > 1 ? a.strides[i] : b.strides[i];
    if ((a.sizes[i] == 1 && b.sizes[i] == 1) || stride == 0) continue;
    int at = count++;
    for (; at > 0 && steps[at - 1].stride > stride; --at) steps[at] = steps[at - 1];
    steps[at] = {stride, a.sizes[i] - 1, b.sizes[i] - 1};
  }
  return !can_sum_to(steps, count, apart / width);
}

}  // namespace overlap

// Return true if two views have the same elements in the same order.
inline bool same_elements(const View& a, const View& b) {
  bool same = a.data == b.data && a.ndim == b.ndim;
  for (int64_t i = 0; same && i < a.ndim; ++i)
    same = a.sizes[i] == b.sizes[i] && (a.sizes[i] <= 1 || a.strides[i] == b.strides[i]);
  return same;
}

inline bool overlaps(const View& a, const View& b) {
  if (a.numel == 0 || b.numel == 0) return false;
  const auto [a_low, a_high] = overlap::extent(a);
  const auto [b_low, b_high] = overlap::extent(b);
  return a_low < b_high && b_low < a_high && !overlap::interleaved(a, b);
}

}  // namespace flashinfer::binding
