// Vectors of an element type's compute type, for kernels where accuracy matters more than speed: double for
// float32 and float64, float for the half types. One text of a kernel serves all four types.
#pragma once

#include <cstring>

#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

template <typename T>
struct Lanes {
  using V = vfloat;
  using S = float;
  static constexpr int kCount = kLanes;

  static V load(const T* from, int count) { return cpu::load(from, count); }
  static void store(T* to, V value, int count) { cpu::store(to, value, count); }
  // Load numbers of the compute type.
  static V load_wide(const S* from, int count) { return cpu::load(from, count); }
  static void store_wide(S* to, V value, int count) { cpu::store(to, value, count); }
};

template <>
struct Lanes<double> {
  using V = vdouble;
  using S = double;
  static constexpr int kCount = kWideLanes;

  static V load(const double* from, int count) {
    V value{};
    std::memcpy(&value, from, count * sizeof(double));
    return value;
  }
  static void store(double* to, V value, int count) { std::memcpy(to, &value, count * sizeof(double)); }
  static V load_wide(const double* from, int count) { return load(from, count); }
  static void store_wide(double* to, V value, int count) { store(to, value, count); }
};

template <>
struct Lanes<float> : Lanes<double> {
  static V load(const float* from, int count) {
    if (count < kWideLanes) {
      V value{};
      for (int lane = 0; lane < count; ++lane) value[lane] = from[lane];
      return value;
    }
    return cpu::load_wide(from);
  }
  static void store(float* to, V value, int count) {
    if (count < kWideLanes) {
      for (int lane = 0; lane < count; ++lane) to[lane] = static_cast<float>(value[lane]);
      return;
    }
    store_narrow(to, value);
  }
};

inline double sum(vdouble value) {
  double total = 0;
  for (int lane = 0; lane < kWideLanes; ++lane) total += value[lane];
  return total;
}

// Call body(i, count) over [0, n): whole vectors of L first, then the remainder.
template <typename L, typename Body>
inline void for_lanes_of(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + L::kCount <= n; i += L::kCount) body(i, L::kCount);
  if (i < n) body(i, static_cast<int>(n - i));
}

}  // namespace flashinfer::cpu
