// Vectors of float: loads from and stores to float32, float16 and bfloat16, loads from float8. The file of
// each instruction set supplies one conversion per type.
#pragma once

#include <flashinfer/cpu/simd/avx2.h>
#include <flashinfer/cpu/simd/avx512.h>
#include <flashinfer/cpu/simd/convert.h>
#include <flashinfer/cpu/simd/neon.h>
#include <flashinfer/cpu/simd/portable.h>

namespace flashinfer::cpu {

// ---- kLanes elements --------------------------------------------------------------------------------------

inline vfloat load(const float* from) { return load_raw<vfloat>(from); }
inline void store(float* to, vfloat value) { std::memcpy(to, &value, sizeof(value)); }

// Load the first `count` < kLanes elements. The other lanes are zero.
template <typename T>
inline vfloat load_some(const T* from, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_some(T* to, vfloat value, int64_t count) {
  T padded[kLanes];
  store(padded, value);
  std::memcpy(to, padded, count * sizeof(T));
}

template <typename T>
inline vfloat load(const T* from, int count) {
  return count == kLanes ? load(from) : load_some(from, count);
}

template <typename T>
inline void store(T* to, vfloat value, int count) {
  count == kLanes ? store(to, value) : store_some(to, value, count);
}

// Load elements for work on each one by itself, see Two.
template <typename T>
inline Two load_two(const T* from) {
  return {load(from), load(from + kLanes)};
}

template <typename T>
inline void store_two(T* to, Two values) {
  store(to, values.first);
  store(to + kLanes, values.second);
}

// ---- all elements -----------------------------------------------------------------------------------------

inline float sum(vfloat value) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}

// Return lanes of `yes` if `mask` is set, otherwise of `no`.
inline vfloat select(vint mask, vfloat yes, vfloat no) {
  return bit_cast<vfloat>((bit_cast<vint>(yes) & mask) | (bit_cast<vint>(no) & ~mask));
}

// Call body(i, count) over [0, n): whole vectors first (count == kLanes), then the remainder.
template <typename Body>
inline void for_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

// Call body over a constant number of elements: code for the remainder exists only if there is one.
template <int kCount, typename Body>
inline void for_lanes(const Body& body) {
  for (int i = 0; i + kLanes <= kCount; i += kLanes) body(i, kLanes);
  if constexpr (kCount % kLanes != 0) body(kCount / kLanes * kLanes, kCount % kLanes);
}

// Call body_two(i) for 2 * kLanes elements at a time, then body for the rest.
template <typename BodyTwo, typename Body>
inline void for_lanes(int64_t n, const BodyTwo& body_two, const Body& body) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) body_two(i);
  for (; i < n; i += kLanes) body(i, static_cast<int>(n - i < kLanes ? n - i : kLanes));
}

}  // namespace flashinfer::cpu
