// NEON of 64-bit ARM: conversions of kLanes elements.
#pragma once

#include <flashinfer/cpu/simd/convert.h>

#if defined(FLASHINFER_NEON)
// arm_neon.h's global bfloat16_t would be ambiguous with ours if a variant uses our namespace.
#define bfloat16_t arm_bfloat16_t
#include <arm_neon.h>
#undef bfloat16_t

namespace flashinfer::cpu {

inline vfloat load(const bfloat16_t* from) { return (vfloat)vshll_n_u16(load_raw<uint16x4_t>(from), 16); }
inline vfloat load(const half_t* from) { return (vfloat)vcvt_f32_f16(load_raw<float16x4_t>(from)); }
inline vfloat load(const fp8_e5m2_t* from) {
  const uint8x8_t bytes = (uint8x8_t)vcreate_u64(load_raw<uint32_t>(from));
  return (vfloat)vcvt_f32_f16((float16x4_t)vzip1_u8(vdup_n_u8(0), bytes));
}
inline vfloat load(const fp8_e4m3_t* from) {
  // The sign is extended into the bit above the exponent, and that copy is masked out.
  const int16x4_t extended = vget_low_s16(vmovl_s8((int8x8_t)vcreate_u64(load_raw<uint32_t>(from))));
  const int16x4_t halves = vand_s16(vshl_n_s16(extended, 7), vdup_n_s16(-0x4001));
  const vfloat value = (vfloat)vcvt_f32_f16((float16x4_t)halves) * 256.0f;
  const vuint bits = bit_cast<vuint>(value), is_nan = bit_cast<vuint>((bits & 0x7fffffffu) == 0x43f00000u);  // 480
  return bit_cast<vfloat>(bits | is_nan >> 1);
}

inline void store(bfloat16_t* to, vfloat value) {
  const uint16x4_t result = vmovn_u32((uint32x4_t)bfloat16_bits(value));
  std::memcpy(to, &result, sizeof(result));
}
inline void store(half_t* to, vfloat value) {
  const float16x4_t result = vcvt_f16_f32((float32x4_t)value);
  std::memcpy(to, &result, sizeof(result));
}

// Return b if either is NaN.
inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

inline Wide widen(vfloat value) {
  const float32x4_t both = (float32x4_t)value;
  return {(vdouble)vcvt_f64_f32(vget_low_f32(both)), (vdouble)vcvt_high_f64_f32(both)};
}
inline vfloat narrow(Wide value) {
  return (vfloat)vcvt_high_f32_f64(vcvt_f32_f64((float64x2_t)value.low), (float64x2_t)value.high);
}
inline vdouble load_wide(const float* from) { return (vdouble)vcvt_f64_f32(load_raw<float32x2_t>(from)); }
inline void store_narrow(float* to, vdouble value) {
  const float32x2_t result = vcvt_f32_f64((float64x2_t)value);
  std::memcpy(to, &result, sizeof(result));
}

}  // namespace flashinfer::cpu
#endif
