// Prefill on Hopper: the tile of each head dimension.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include <flashinfer/cuda/attention/sm90/launch.cuh>

namespace flashinfer::cuda::sm90 {

// The tile of each pair of head dimensions. A consumer thread holds kDV / 2 registers of O, kKeys / 2 of S
// and kKeys / 4 of P. It has 160 registers with three consumers, 232 with two. A CTA has 227 KiB of shared
// memory.
template <int kHeadDimQK, int kHeadDimVO>
struct PrefillTile;

// 32 + 64 + 32 registers and 168 KiB. 160 keys would need 152 registers, which leaves too few for addresses.
template <>
struct PrefillTile<64, 64> : TileConfig<3> {
  static constexpr int kKeys = 128, kStages = 3, kQueryStages = 2, kOutputColumns = 64;
};

// 64 + 40 + 20 registers and 216 KiB: queries and outputs 48 KiB each, three stages of K and V 120 KiB. 96
// keys, the next step, would need 240 KiB.
template <>
struct PrefillTile<128, 128> : TileConfig<3> {
  static constexpr int kKeys = 80, kStages = 3, kQueryStages = 1, kOutputColumns = 128;
};

// 64 + 32 + 16 registers and 200 KiB: queries 72 KiB, outputs 48 KiB, two stages 80 KiB. Three would need 240
// KiB.
template <>
struct PrefillTile<192, 128> : TileConfig<3> {
  static constexpr int kKeys = 64, kStages = 2, kQueryStages = 1, kOutputColumns = 128;
};

// 128 + 32 + 16 registers: too many for three consumers. 224 KiB: two stages take 128 KiB, and half of the
// output's columns are staged at a time. 80 keys would need 256 KiB.
template <>
struct PrefillTile<256, 256> : TileConfig<2> {
  static constexpr int kKeys = 64, kStages = 2, kQueryStages = 1, kOutputColumns = 128;
};

// The tile of 8-bit types: kKeys / 8 registers of P, and stages of copied values before their transposition.
template <int kHeadDim>
struct Fp8PrefillTile;

// 32 + 80 + 20 registers and 128 KiB. 192 keys would need 152 registers.
template <>
struct Fp8PrefillTile<64> : TileConfig<3> {
  static constexpr int kKeys = 160, kStages = 3, kQueryStages = 2, kOutputColumns = 64, kRawStages = 2;
};

// 64 + 48 + 12 registers and 192 KiB. The transposing warp gets 56 registers, which leaves consumers 152: 128
// keys would take 144 of them.
template <>
struct Fp8PrefillTile<128> : TileConfig<3> {
  static constexpr int kKeys = 96, kStages = 3, kQueryStages = 2, kOutputColumns = 128, kRawStages = 2;
  static constexpr int kProducerRegisters = 56;
};

// 128 + 32 + 8 registers: too many for three consumers. 160 KiB.
template <>
struct Fp8PrefillTile<256> : TileConfig<2> {
  static constexpr int kKeys = 64, kStages = 2, kQueryStages = 1, kOutputColumns = 128, kRawStages = 2;
};

template <typename Types>
using PrefillConfig = std::conditional_t<Types::kFp8, Fp8PrefillTile<Types::HEAD_DIM_QK>,
                                         PrefillTile<Types::HEAD_DIM_QK, Types::HEAD_DIM_VO>>;
template <typename Types>
using PrefillShape = Shape<Types, Tile<PrefillConfig<Types>>>;

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
