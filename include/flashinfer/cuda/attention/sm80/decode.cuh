// Decode on CUDA: few rows, so that the keys' way through memory is what takes the time.
#pragma once

#include <flashinfer/cuda/attention/sm80/launch.cuh>

namespace flashinfer::cuda {

template <typename Types>
using DecodeShape = AttentionShape<Types, SmallTile<Types>>;

// A cut costs no launch, so that pieces need not be long, and warps need not have the same number of tiles.
template <typename Variant, typename Types, typename P>
WorkLimits decode_limits(int device) {
  using S = DecodeShape<Types>;
  const WorkLimits limits = limits_of<Variant, S, P>(device);
  return {limits.tile_rows, limits.places, 2 * S::kKeys * S::kKeyWarps, S::kKeys};
}

template <typename Variant, typename Types, typename P>
void decode(const P& params, const Launch& where) {
  launch_attention<Variant, DecodeShape<Types>>(params, where);
}

}  // namespace flashinfer::cuda
