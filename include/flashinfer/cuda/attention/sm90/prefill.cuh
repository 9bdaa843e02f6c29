// Prefill on Hopper: the tile of each head dimension.
#pragma once

#include <stdexcept>
#include <string>

#include <flashinfer/cuda/attention/sm90/launch.cuh>

namespace flashinfer::cuda::sm90 {

template <typename T>
struct Is {
  using type = T;
};

// As many rows as registers hold outputs for, and as many keys as registers and shared memory leave room for.
template <int kHeadDimQK, int kHeadDimVO>
struct PrefillTile;
template <>
struct PrefillTile<64, 64> : Is<Tile<3, 128, 3, 2, 64>> {};
template <>
struct PrefillTile<128, 128> : Is<Tile<3, 80, 3, 1, 128>> {};
template <>
struct PrefillTile<192, 128> : Is<Tile<3, 64, 2, 1, 128>> {};
template <>
struct PrefillTile<256, 256> : Is<Tile<2, 64, 2, 1, 128>> {};

// Of 8 bits.
template <int kHeadDim>
struct PrefillTile8;
template <>
struct PrefillTile8<64> : Is<Tile<3, 160, 3, 2, 64, 2>> {};
template <>
struct PrefillTile8<128> : Is<Tile<3, 96, 3, 2, 128, 2, 56>> {};
template <>
struct PrefillTile8<256> : Is<Tile<2, 64, 2, 1, 128, 2>> {};

template <typename Types, bool kFp8 = Types::kFp8>
struct ShapeOf : Is<Shape<Types, typename PrefillTile<Types::HEAD_DIM_QK, Types::HEAD_DIM_VO>::type>> {};
template <typename Types>
struct ShapeOf<Types, true> : Is<Shape<Types, typename PrefillTile8<Types::HEAD_DIM_QK>::type>> {
  static_assert(Types::HEAD_DIM_QK == Types::HEAD_DIM_VO, "values of 8 bits have the head_dim of keys");
};
template <typename Types>
using PrefillShape = typename ShapeOf<Types>::type;

template <typename Types>
WorkLimits prefill_limits(int32_t group, int32_t tile_rows, int device) {
  using S = PrefillShape<Types>;
  if (group > S::kRows)
    throw std::runtime_error("prefill: got " + std::to_string(group) + " query heads for a key head, wanted at most " +
                             std::to_string(S::kRows));
  const WorkLimits limits = limits_of<S>(group, device);
  if (tile_rows != 0 && tile_rows != limits.tile_rows)
    throw std::runtime_error("prefill: no kernel has tiles of " + std::to_string(tile_rows) + " rows");
  return limits;
}

template <typename Variant, typename Types, typename P>
void prefill(const P& params, const Launch& where) {
  static_assert(!Variant::transforms_key, "keys are used as they are: a KeyTransform needs backend fa2");
  launch_attention<Variant, PrefillShape<Types>>(params, where);
}

}  // namespace flashinfer::cuda::sm90
