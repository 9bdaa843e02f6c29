// RoPE on the fly (RoFormer, arXiv 2104.09864): pairs of elements half a head apart, rotated by angles
// proportional to the position.
//
// A rotated key rounded to 16 bits would change a logit by more than 1e-3. Each element x is therefore stored
// in two parts: h is x rounded, and g is h / 32 + e rounded, with e = x - h. Then h h' * 31/32 + g * 32 g' =
// x x' + 31 e e', up to the rounding of g. This adds 1/32 of the error of rounding x. The g of queries has a
// further factor 32 * 32/31, so that the sum of both products is the logit times 32/31.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>

namespace flashinfer::cuda {

// Frequency of a pair of elements. A turn is an angle of 2 pi.
struct alignas(16) RopeFrequency {
  uint64_t turns_per_position;  // times 2^64, so that whole turns overflow
  float step_c, step_s;         // cosine and sine of the angle between a thread's successive keys of a tile
};

constexpr float kFirstFactor = 31.0f / 32;
constexpr float kQueryFactor = 32 / kFirstFactor;

// Return the second part g of x, whose first part is `rounded`.
__device__ __forceinline__ float second_part(float x, float rounded) { return fmaf(rounded, -kFirstFactor, x); }

// Return cosine and sine. The angle is exact to 2^-32 of a turn at any position, because multiplication modulo
// 2^64 drops whole turns only.
__device__ __forceinline__ void find_angle(uint64_t frequency, int64_t position, float& c, float& s) {
  const auto part = static_cast<int32_t>(frequency * static_cast<uint64_t>(position) >> 32);
  const float angle = static_cast<float>(part) * static_cast<float>(6.283185307179586 / 4294967296.0);
  c = __cosf(angle), s = __sinf(angle);
}

__device__ __forceinline__ void rotate(float& a, float& b, float c, float s) {
  const float x = a, y = b;
  a = x * c - y * s, b = y * c + x * s;
}

// The threads of a group share the rotation of a tile: each rotates 8 pairs of every kStep-th key.
template <typename S>
struct RotationShape {
  static constexpr int kColumns = S::kDQ / 16, kStep = S::kGroupThreads / kColumns;
  static constexpr int kEach = (S::kKeys + kStep - 1) / kStep;  // keys of a thread; the last may be after the tile
  static constexpr int kAtOnce = kEach < 4 ? kEach : 4;
  static_assert(kStep > 0, "a group has a thread for every 8 pairs of a key");

  // Index of the frequency of a pair. Threads with adjacent columns read adjacent entries.
  __device__ __forceinline__ static int index(int pair) { return pair % 8 * kColumns + pair / 8; }
};

template <typename S, typename P>
__device__ __forceinline__ void find_frequencies(const P& params, RopeFrequency* frequencies) {
  const double* numbers = numbers_of(params, 0);
  const double rcp_scale = numbers ? 1.0 / numbers[kRopeScale] : params.rope_rcp_scale;
  const double rcp_theta = numbers ? 1.0 / numbers[kRopeTheta] : params.rope_rcp_theta;
  for (int i = threadIdx.x; i < S::kDQ / 2; i += S::kThreads) {
    const double exact = exp2(log2(rcp_theta) * 2 * i / S::kDQ) * rcp_scale / 6.283185307179586;
    RopeFrequency& one = frequencies[RotationShape<S>::index(i)];
    one.turns_per_position = static_cast<uint64_t>((exact - floor(exact)) * 18446744073709551616.0);
    find_angle(one.turns_per_position, RotationShape<S>::kStep, one.step_c, one.step_s);
  }
}

// Elements first to first + 7 of a key in shared memory, before conversion.
template <typename S>
struct RawElements {
  static constexpr int kSize = sizeof(typename S::KV);
  std::conditional_t<kSize == 1, uint2, uint4> raw;

  __device__ __forceinline__ void load(uint32_t row, int first) {
    const uint32_t at = Swizzle<S::kKRowBytes>::chunk(row, first * kSize / 16) + first * kSize % 16;
    if constexpr (kSize == 1) {
      raw = ptx::load_shared_8(at);
    } else {
      raw = ptx::load_shared_16(at);
    }
  }
  __device__ __forceinline__ void to_floats(float (&x)[8]) const {
    using T = typename S::DTypeQ;
    if constexpr (kSize == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        unpack<T>(widen<T, typename S::KV>((i < 2 ? raw.x : raw.y) >> i % 2 * 16), x[2 * i], x[2 * i + 1]);
    } else {
      unpack<T>(raw.x, x[0], x[1]), unpack<T>(raw.y, x[2], x[3]);
      unpack<T>(raw.z, x[4], x[5]), unpack<T>(raw.w, x[6], x[7]);
    }
  }
};

// Store both parts of eight elements, chunk `column` of a row of queries or keys. The second is multiplied
// by `factor`.
template <typename S>
__device__ __forceinline__ void store_parts(const float (&x)[8], uint32_t first_part, uint32_t second, int row,
                                            int column, float factor = 1) {
  using T = typename S::DTypeQ;
  using Rows = Swizzle<2 * S::kDQ>;
  uint32_t rounded[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low, high;
    rounded[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    unpack<T>(rounded[i], low, high);
    rest[i] = pack<T>(second_part(x[2 * i], low) * factor, second_part(x[2 * i + 1], high) * factor);
  }
  const uint32_t at = Rows::chunk(Rows::row(0, row), column);
  ptx::store_shared_16(first_part + at, {rounded[0], rounded[1], rounded[2], rounded[3]});
  ptx::store_shared_16(second + at, {rest[0], rest[1], rest[2], rest[3]});
}

// Rotate a group's tile for all warps that use it. The tile starts at key tile_start of the request. The
// first part may overwrite `raw`.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void rotate_tile(const P& params, const Variant& variant, const RopeFrequency* frequencies,
                                            uint32_t raw, uint32_t first_part, uint32_t second, int32_t thread,
                                            int32_t tile_start) {
  using Shape = RotationShape<S>;
  constexpr int kColumns = Shape::kColumns, kStep = Shape::kStep, kEach = Shape::kEach, kAtOnce = Shape::kAtOnce;
  const int column = thread % kColumns, start = thread / kColumns;
  if (start >= kStep) return;
  const auto is_past_end = [&](int n) { return S::kKeys % kStep != 0 && start + n * kStep >= S::kKeys; };
  const auto position = static_cast<uint32_t>(tile_start + start);
  float c[8], s[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) find_angle(frequencies[i * kColumns + column].turns_per_position, position, c[i], s[i]);
#pragma unroll
  for (int first = 0; first < kEach; first += kAtOnce) {
    RawElements<S> keys[kAtOnce][2];  // loaded before the first store: the compiler moves no load above a store
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n >= kEach || is_past_end(first + n)) continue;
      const uint32_t row = Swizzle<S::kKRowBytes>::row(raw, start + (first + n) * kStep);
      keys[n][0].load(row, 8 * column), keys[n][1].load(row, 8 * column + S::kDQ / 2);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (first + n >= kEach || is_past_end(first + n)) continue;
      float a[8], b[8];
      keys[n][0].to_floats(a), keys[n][1].to_floats(b);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (Variant::transforms_key)
          a[i] = static_cast<float>(variant.KeyTransform(params, a[i])),
          b[i] = static_cast<float>(variant.KeyTransform(params, b[i]));
        rotate(a[i], b[i], c[i], s[i]);
        const RopeFrequency& frequency = frequencies[i * kColumns + column];
        if (first + n + 1 < kEach) rotate(c[i], s[i], frequency.step_c, frequency.step_s);
      }
      store_parts<S>(a, first_part, second, start + (first + n) * kStep, column);
      store_parts<S>(b, first_part, second, start + (first + n) * kStep, column + kColumns);
    }
  }
}

}  // namespace flashinfer::cuda
