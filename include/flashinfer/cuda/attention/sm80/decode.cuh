// Decode on CUDA: few rows, so that the keys' way through memory is what takes the time.
#pragma once

#include <flashinfer/cuda/attention/sm80/launch.cuh>

namespace flashinfer::cuda {

template <typename Types>
using DecodeShape = AttentionShape<Types, SmallTile<Types>>;

template <typename Variant, typename Types, typename P>
WorkLimits decode_limits(int device) {
  WorkLimits limits = limits_of<Variant, DecodeShape<Types>, P>(device);
  limits.item_keys = 128;
  return limits;
}

template <typename Variant, typename Types, typename P>
void decode(const P& params, const Launch& where) {
  launch_attention<Variant, DecodeShape<Types>>(params, where);
}

}  // namespace flashinfer::cuda
