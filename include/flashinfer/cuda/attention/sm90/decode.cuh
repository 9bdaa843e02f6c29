// Decode on Hopper: the portable kernel with finer splits of keys. The kernel also merges the partial states
// (see tickets.cuh).
#pragma once

#include <flashinfer/cuda/attention/sm80/launch.cuh>

namespace flashinfer::cuda::sm90 {

template <typename Types>
using DecodeShape = AttentionShape<Types, SmallTile<Types>>;

// A split costs no launch. Splits may therefore be short, and warps need not have equal numbers of tiles.
template <typename Variant, typename Types, typename P>
WorkLimits decode_limits(int device) {
  using S = DecodeShape<Types>;
  return {S::kRows, residency<attention_kernel<Variant, S, P, true>, S>(device).ctas, 2 * S::kKeys * S::kKeyWarps,
          S::kKeys};
}

template <typename Variant, typename Types, typename P>
void decode(const P& params, const Launch& where) {
  static_assert(!Types::kRope, "keys are used as they are: rotation needs backend fa2");
  launch_attention<Variant, DecodeShape<Types>, P, true>(params, where);
}

}  // namespace flashinfer::cuda::sm90
