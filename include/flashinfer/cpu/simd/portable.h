// Conversions of kLanes elements for any processor: by vector extensions, or one element at a time.
#pragma once

#include <flashinfer/cpu/simd/convert.h>

#if defined(FLASHINFER_PORTABLE)

namespace flashinfer::cpu {

inline vfloat load(const bfloat16_t* from) {
  return bit_cast<vfloat>(__builtin_convertvector(load_raw<vushort>(from), vuint) << 16);
}

template <typename T>
inline vfloat load_each(const T* from) {
  vfloat value;
  for (int lane = 0; lane < kLanes; ++lane) value[lane] = to_float(from[lane]);
  return value;
}
inline vfloat load(const half_t* from) { return load_each(from); }
inline vfloat load(const fp8_e5m2_t* from) { return load_each(from); }
inline vfloat load(const fp8_e4m3_t* from) { return load_each(from); }

inline void store(bfloat16_t* to, vfloat value) {
  const vushort result = __builtin_convertvector(bfloat16_bits(value), vushort);
  std::memcpy(to, &result, sizeof(result));
}
inline void store(half_t* to, vfloat value) {
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = from_float<half_t>(value[lane]);
}

// Return b if either is NaN.
inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

inline Wide widen(vfloat value) { return {vdouble{value[0], value[1]}, vdouble{value[2], value[3]}}; }
inline vfloat narrow(Wide value) {
  return vfloat{static_cast<float>(value.low[0]), static_cast<float>(value.low[1]), static_cast<float>(value.high[0]),
                static_cast<float>(value.high[1])};
}
inline vdouble load_wide(const float* from) { return vdouble{from[0], from[1]}; }
inline void store_narrow(float* to, vdouble value) {
  to[0] = static_cast<float>(value[0]), to[1] = static_cast<float>(value[1]);
}

}  // namespace flashinfer::cpu
#endif
