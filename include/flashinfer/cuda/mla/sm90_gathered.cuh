// What a warpgroup of the Hopper kernel computes where rows are gathered. For a pair of blocks, a and b:
//
//   warpgroup 0, columns 0-255                            warpgroup 1, columns 256-511
//   maxima of a, told to 1; weights P_a, given to 1       takes 0's references; maxima of b; P_b, given to 0
//   O += P_a V_a, from registers                          O += P_a V_a
//   takes 1's references; O += P_b V_b                    O += P_b V_b, from registers
//   logits of the next a                                  logits of the next b
//
// Weights are given away before they are used, relative to the references of whom they come from: warpgroup 1
// multiplies P_a before it rescales for what it raised itself.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/mla/sm90_tile.cuh>

namespace flashinfer::cuda::sm90 {

template <typename T, int kGroup, typename Track>
struct MlaGatheredGroup : MlaGroup<T, kGroup, true, Track> {
  using Base = MlaGroup<T, kGroup, true, Track>;
  using Base::Base;
  using Base::multiply_other, Base::multiply_own, Base::release, Base::rescale, Base::store_weights;
  using Base::o, Base::shared, Base::sum, Base::take_references, Base::weigh, Base::z, Base::zero;
  using Base::profiler;

  template <bool kLast>
  __device__ __forceinline__ void attend_left(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float own[2] = {1, 1}, others[2] = {1, 1};
    profiler.turn(Event::kSoftmax);
    const bool raised = weigh(2 * pair, p, own);
    store_weights(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaWeightsA);
    if (raised) rescale(own);
    profiler.turn(Event::kGemmPv);
    multiply_own(p);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    profiler.turn(Event::kWaitWeights);
    release(0);
    ptx::named_barrier<256>(kMlaWeightsB);
    if (take_references(others)) {
      rescale(others);
      sum[0] *= others[0], sum[1] *= others[1];
    }
    this->template end_left<kLast>(pair, parity);
  }

  template <bool kLast>
  __device__ __forceinline__ void attend_right(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float own[2] = {1, 1}, others[2] = {1, 1};
    profiler.turn(Event::kWaitMaxima);
    ptx::named_barrier<256>(kMlaMaximaA);
    profiler.turn(Event::kSoftmax);
    const bool other = take_references(others);
    sum[0] *= others[0], sum[1] *= others[1];
    weigh(2 * pair + 1, p, own);
    store_weights(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaWeightsB);
    if (other) rescale(others);
    profiler.turn(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaWeightsA);
    profiler.turn(Event::kGemmPv);
    // Weights of a are relative to the references from before a warp of this warpgroup raised them. All four warps
    // take the same way: products are theirs together.
    volatile const int* raised = shared.raised(kGroup);
    if (raised[0] | raised[1] | raised[2] | raised[3]) {
      multiply_other();
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
      rescale(own);
      multiply_own(p);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
      ptx::warpgroup_hold(p);
      release(0);
      release(1);
    } else {
      multiply_other();
      multiply_own(p);
      ptx::warpgroup_wait<1>();
      release(0);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
      ptx::warpgroup_hold(p);
      release(1);
    }
    if constexpr (!kLast) this->score_right(pair, parity);
  }

  template <bool kLast>
  __device__ __forceinline__ void attend(int pair) {
    if constexpr (kGroup == 0) {
      attend_left<kLast>(pair);
    } else {
      attend_right<kLast>(pair);
    }
  }
};

}  // namespace flashinfer::cuda::sm90
