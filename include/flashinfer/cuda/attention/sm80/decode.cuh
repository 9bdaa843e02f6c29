// Decode on CUDA (Flash-Decoding, Dao et al., 2023): few rows, and keys split among CTAs. The kernel is bound
// by memory bandwidth.
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
