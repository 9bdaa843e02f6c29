// Conversion of floats to 8-bit numbers: rounded to nearest, ties to even, clamped to the finite range. NaN
// stays NaN, or becomes the integer 0.
#pragma once

#include <type_traits>

#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// Return numbers as elements of type T hold them.
template <typename T>
inline vfloat rounded_to(vfloat x) {
  if constexpr (std::is_same_v<T, float>) return x;
  T rounded[kLanes];
  store(rounded, x);
  return load(rounded);
}

// Properties of a format: mantissa bits, and the exponent field of a float for its least normal number.
template <typename T>
struct Fp8Format;
template <>
struct Fp8Format<fp8_e4m3_t> {
  static constexpr uint32_t kMantissa = 3, kMinExponent = 121;
  static constexpr float kMax = 448.0f;
};
template <>
struct Fp8Format<fp8_e5m2_t> {
  static constexpr uint32_t kMantissa = 2, kMinExponent = 113;
  static constexpr float kMax = 57344.0f;
};

// Store the first `count` of kLanes elements.
template <typename T>
inline void store_quantized(T* to, vfloat value, int count) {
  using Format = Fp8Format<T>;
  const vuint bits = bit_cast<vuint>(value), sign = bits >> 24 & 0x80u;
  const vuint is_nan = bit_cast<vuint>(value != value);
  const vfloat absolute = bit_cast<vfloat>(bits & 0x7fffffffu);
  const vfloat magnitude = select(absolute > splat(Format::kMax), splat(Format::kMax), absolute);
  const vuint exponent = bit_cast<vuint>(magnitude) >> 23, least = Format::kMinExponent + (bits & 0u);
  const vuint below = bit_cast<vuint>(exponent < least);
  const vuint kept = (least & below) | (exponent & ~below);
  // Adding a power of two whose last bit is the result's last bit makes the hardware round to it.
  const vuint anchor = (kept + (23 - Format::kMantissa)) << 23;
  const vuint rounded = bit_cast<vuint>(magnitude + bit_cast<vfloat>(anchor)) - anchor;
  const vuint number = ((kept - Format::kMinExponent) << Format::kMantissa) + rounded;
  const vuint result = sign | (number & ~is_nan) | (0x7fu & is_nan);
  for (int lane = 0; lane < count; ++lane) to[lane].bits = static_cast<uint8_t>(result[lane]);
}

inline void store_quantized(int8_t* to, vfloat value, int count) {
  const vfloat number = select(bit_cast<vint>(value == value), value, splat(0.0f));
  const vfloat low = select(bit_cast<vint>(number < splat(-128.0f)), splat(-128.0f), number);
  const vfloat clamped = select(bit_cast<vint>(low > splat(127.0f)), splat(127.0f), low);
  // The last bit of 1.5 * 2^23 is a unit: the sum's last bits are the integer.
  const vuint bits = bit_cast<vuint>(clamped + splat(12582912.0f));
  for (int lane = 0; lane < count; ++lane) to[lane] = static_cast<int8_t>(bits[lane] & 0xffu);
}

}  // namespace flashinfer::cpu
