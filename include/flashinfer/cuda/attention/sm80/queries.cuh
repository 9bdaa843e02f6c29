// Load queries, transform them, and store them to shared memory.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/rotation.cuh>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment8.cuh>
#include <flashinfer/cuda/tile/swizzle.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// Store eight elements of a row of queries, from `first` on. With fp8 keys, they are permuted like the keys.
template <typename S>
__device__ __forceinline__ void store_elements(uint8_t* to, int row, int first, const float (&x)[8]) {
  using T = typename S::DTypeQ;
  using Rows = Swizzle<S::kQRowBytes>;
  if constexpr (S::kRope) {
    const uint32_t start = ptx::shared_address(to);
    store_parts<S>(x, start, start + S::kQPartBytes, row, first / 8, kQueryFactor);
  } else if constexpr (S::kFp8Keys) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int position = position_in_8(first + i);
      *reinterpret_cast<T*>(to + Rows::chunk(Rows::row(0, row), position / 8) + position % 8 * 2) = from_float<T>(x[i]);
    }
  } else {
    *reinterpret_cast<Vec<T, 8>*>(to + Rows::chunk(Rows::row(0, row), first / 8)) = Vec<T, 8>::from_floats(x);
  }
}

// Store chunk `chunk` of a row of queries, and the chunk half a head further, transformed, to shared memory.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void store_queries(const P& params, const Variant& variant, uint8_t* to, int row, int chunk,
                                              const Vec<typename S::DTypeQ, 8> (&in)[2],
                                              const RopeFrequency* frequencies, int32_t position, float sign) {
  float a[8], b[8];
  in[0].to_floats(a), in[1].to_floats(b);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (Variant::transforms_query)
      a[i] = static_cast<float>(variant.QueryTransform(params, a[i])),
      b[i] = static_cast<float>(variant.QueryTransform(params, b[i]));
    if constexpr (S::kRope) {
      float c, s;
      find_angle(frequencies[RotationShape<S>::index(chunk * 8 + i)].turns_per_position, position, c, s);
      rotate(a[i], b[i], c, s);
    }
    a[i] *= sign, b[i] *= sign;
  }
  store_elements<S>(to, row, chunk * 8, a);
  store_elements<S>(to, row, chunk * 8 + S::kDQ / 2, b);
}

// Load the tile's rows of queries, times `sign` (see query_sign()). Rows after the last are zeros.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void load_queries(const P& params, const Variant& variant, const WorkItem& item,
                                             int32_t head, uint8_t* to, const RopeFrequency* frequencies, float sign) {
  using V = Vec<typename S::DTypeQ, 8>;
  constexpr bool kUnchanged = !S::kFp8 && !S::kRope && !Variant::transforms_query;
  constexpr int kChunks = kUnchanged ? S::kDQ / 8 : S::kDQ / 16, kOther = S::kDQ / 2;
  const int32_t group = static_cast<int32_t>(params.group.divisor), rows = item.qo_len * group;
  const uint32_t flip = sign < 0 ? 0x80008000u : 0;
#pragma unroll kUnchanged ? 4 : 1
  for (int i = threadIdx.x; i < S::kRows * kChunks; i += S::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint32_t qo_idx, in_group;
    params.group.divmod(item.row_start + row, qo_idx, in_group);
    const auto* from = static_cast<const typename S::DTypeQ*>(params.q) +
                       (item.qo_start + int64_t{qo_idx}) * params.q_row + (head * group + in_group) * params.q_head +
                       chunk * 8;
    const bool exists = item.row_start + row < rows;
    if constexpr (kUnchanged) {
      uint4 raw = exists ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
      raw.x ^= flip, raw.y ^= flip, raw.z ^= flip, raw.w ^= flip;
      *reinterpret_cast<uint4*>(to + Swizzle<S::kQRowBytes>::chunk(Swizzle<S::kQRowBytes>::row(0, row), chunk)) = raw;
    } else {
      V in[2] = {};
      if (exists) in[0] = load_vec<typename S::DTypeQ, 8>(from), in[1] = load_vec<typename S::DTypeQ, 8>(from + kOther);
      const int32_t position = item.kv_len - item.qo_len + static_cast<int32_t>(qo_idx);
      store_queries<Variant, S>(params, variant, to, row, chunk, in, frequencies, position, sign);
    }
  }
}

}  // namespace flashinfer::cuda
