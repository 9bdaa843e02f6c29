// Prefill on CUDA: a tile as large as requests have rows, as far as it fits into shared memory.
#pragma once

#include <stdexcept>
#include <string>

#include <flashinfer/cuda/attention/sm80/launch.cuh>

namespace flashinfer::cuda {

// 256 columns of outputs are half of a thread's registers with 16 rows of a warp; 128 are with 32.
template <typename Types, bool kRope = Types::kRope>
struct PrefillShapes {
  static constexpr bool kWide = Types::HEAD_DIM_VO > 128;
  static constexpr int kFewKeys = Types::HEAD_DIM_QK > 128 ? 32 : 64;
  using Small = AttentionShape<Types, SmallTile<Types>>;
  using Medium = AttentionShape<Types, AttentionTile<1, 4, 1, kFewKeys, 2, 2>>;
  using Large =
      AttentionShape<Types, AttentionTile<kWide ? 1 : 2, kWide ? 8 : 4, 1, kWide ? 64 : kFewKeys, 2, kWide ? 1 : 2>>;
};

// Rotating a tile of keys costs as much whatever the rows: they are as many as shared memory holds. It has queries and
// keys in two parts, three stages, and two tiles' second parts.
template <typename Types>
struct PrefillShapes<Types, true> {
  static constexpr bool kWide = Types::HEAD_DIM_QK > 128;
  static constexpr int kKeys = Types::HEAD_DIM_QK > 192 ? 16 : Types::HEAD_DIM_QK > 64 ? 32 : 64;
  using Small = AttentionShape<Types, SmallTile<Types>>;
  using Medium = AttentionShape<Types, AttentionTile<1, 4, 1, kKeys, 3, 2>>;
  using Large = AttentionShape<Types, AttentionTile<kWide ? 1 : 2, 8, 1, kKeys, 3, 1>>;
};

// Where the right tile is too large for the device, a smaller one.
template <typename Variant, typename Types, typename P>
WorkLimits prefill_limits(int64_t rows, int32_t tile_rows, int device) {
  using Shapes = PrefillShapes<Types>;
  const int64_t wanted = tile_rows != 0 ? tile_rows : rows;
  WorkLimits limits{};
  if (wanted > Shapes::Large::kRows / 2) limits = limits_of<Variant, typename Shapes::Large, P>(device);
  if (limits.places == 0 && wanted > Shapes::Small::kRows)
    limits = limits_of<Variant, typename Shapes::Medium, P>(device);
  if (limits.places == 0) limits = limits_of<Variant, typename Shapes::Small, P>(device);
  if (limits.places == 0 || (tile_rows != 0 && limits.tile_rows != tile_rows))
    throw std::runtime_error("prefill: no tile of " + std::to_string(wanted) + " rows fits into this GPU");
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
