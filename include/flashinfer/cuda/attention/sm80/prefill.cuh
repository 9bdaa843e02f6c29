// Prefill on CUDA: a tile as large as requests have rows, as far as it fits into shared memory.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include <flashinfer/cuda/attention/sm80/launch.cuh>

namespace flashinfer::cuda {

// 256 columns of outputs are half of a thread's registers with 16 rows of a warp; 128 are with 32.
template <typename Types>
struct PrefillShapes {
  static constexpr bool kWide = Types::HEAD_DIM_VO > 128;
  static constexpr int kMediumKeys = Types::HEAD_DIM_QK > 128 ? 32 : 64;
  static constexpr int kKeys = Types::HEAD_DIM_QK > 128 && !kWide ? 32 : 64;
  using Small = AttentionShape<Types, SmallTile<Types>>;
  using Medium = AttentionShape<Types, AttentionTile<1, 4, 1, kMediumKeys, 2, 2>>;
  using Largest = AttentionShape<Types, AttentionTile<kWide ? 1 : 2, kWide ? 8 : 4, 1, kKeys, 2, kWide ? 1 : 2>>;
  using Large = std::conditional_t<Types::kRope, Medium, Largest>;  // rotations need registers, too
};

// Where the right tile is too large for the device, a smaller one.
template <typename Variant, typename Types, typename P>
WorkLimits prefill_limits(int64_t rows, int32_t tile_rows, int device) {
  using Shapes = PrefillShapes<Types>;
  const int64_t wanted = tile_rows != 0 ? tile_rows : rows;
  WorkLimits limits{};
  if (wanted > Shapes::Medium::kRows) limits = limits_of<Variant, typename Shapes::Large, P>(device);
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
