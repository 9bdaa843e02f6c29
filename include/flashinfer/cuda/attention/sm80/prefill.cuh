// Prefill on CUDA: tiles have about as many rows as requests have, if shared memory allows.
#pragma once

#include <stdexcept>
#include <string>

#include <flashinfer/cuda/attention/sm80/launch.cuh>

namespace flashinfer::cuda {

// O takes half of a thread's registers: 256 columns at 16 rows per warp, or 128 columns at 32 rows. The
// queries of kHuge stay in shared memory: 32 rows fit into every GPU, 128 rows into the 227 KiB of 9.0. Sizes
// that are no multiple of 64 need more registers for addresses: ptxas would spill at 32 rows per warp.
template <typename Types, bool kRope = Types::kRope>
struct PrefillShapes {
  static constexpr bool kWide = Types::HEAD_DIM_VO > 128 || Types::HEAD_DIM_VO % 64 != 0;
  static constexpr bool kHuge = Types::HEAD_DIM_QK > 256;
  static constexpr int kFewKeys = kHuge ? 16 : Types::HEAD_DIM_QK > 128 ? 32 : 64;
  using Small = AttentionShape<Types, SmallTile<Types>>;
  using Medium = AttentionShape<Types, AttentionTile<1, kHuge ? 2 : 4, 1, kFewKeys, 2, 2>>;
  using Large =
      AttentionShape<Types,
                     AttentionTile<kWide ? 1 : 2, kWide ? 8 : 4, 1, kWide && !kHuge ? 64 : kFewKeys, 2, kWide ? 1 : 2>>;
};

// Rotating a tile of keys costs the same for any number of rows. Tiles therefore have as many rows as shared
// memory allows, next to queries and keys in two parts, three stages, and the second parts of two tiles.
template <typename Types>
struct PrefillShapes<Types, true> {
  static constexpr bool kWide = Types::HEAD_DIM_QK > 128;
  static constexpr int kKeys = Types::HEAD_DIM_QK > 192 ? 16 : Types::HEAD_DIM_QK > 64 ? 32 : 64;
  using Small = AttentionShape<Types, SmallTile<Types>>;
  using Medium = AttentionShape<Types, AttentionTile<1, 4, 1, kKeys, 3, 2>>;
  using Large = AttentionShape<Types, AttentionTile<kWide ? 1 : 2, 8, 1, kKeys, 3, 1>>;
};

// Return the limits of the best tile that fits on the device.
template <typename Variant, typename Types, typename P>
WorkLimits prefill_limits(int64_t rows, int32_t tile_rows, int device) {
  using Shapes = PrefillShapes<Types>;
  const int64_t wanted_rows = tile_rows != 0 ? tile_rows : rows;
  WorkLimits limits{};
  if (wanted_rows > Shapes::Large::kRows / 2) limits = limits_of<Variant, typename Shapes::Large, P>(device);
  if (limits.concurrency == 0 && wanted_rows > Shapes::Small::kRows)
    limits = limits_of<Variant, typename Shapes::Medium, P>(device);
  if (limits.concurrency == 0) limits = limits_of<Variant, typename Shapes::Small, P>(device);
  if (limits.concurrency == 0 || (tile_rows != 0 && limits.tile_rows != tile_rows))
    throw std::runtime_error("prefill: no tile of " + std::to_string(wanted_rows) + " rows fits into this GPU");
  return limits;
}

template <typename Variant, typename Types, typename P>
void prefill(const P& params, const Launch& where) {
  using Shapes = PrefillShapes<Types>;
  if (params.tile_rows == Shapes::Large::kRows) {
    launch_attention<Variant, typename Shapes::Large>(params, where);
  } else if (params.tile_rows == Shapes::Medium::kRows) {
    launch_attention<Variant, typename Shapes::Medium>(params, where);
  } else if (params.tile_rows == Shapes::Small::kRows) {
    launch_attention<Variant, typename Shapes::Small>(params, where);
  } else {
    throw std::runtime_error("prefill: no kernel has tiles of " + std::to_string(params.tile_rows) + " rows");
  }
}

}  // namespace flashinfer::cuda
