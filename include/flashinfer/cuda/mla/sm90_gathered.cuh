// The mainloop of a consumer warpgroup if rows are gathered. For a pair of blocks, a and b:
//
//   warpgroup 0, columns 0-255                            warpgroup 1, columns 256-511
//   row_max of a, sent to 1; P_a, sent to 1               receives row_max of 0; row_max of b; P_b, sent to 0
//   O += P_a V_a, from registers                          O += P_a V_a
//   receives row_max of 1; O += P_b V_b                   O += P_b V_b, from registers
//   S of the next a                                       S of the next b
//
// Each warpgroup publishes P before it rescales. P is relative to the sender's row_max: warpgroup 1
// multiplies P_a before it rescales O for maxima that it has raised itself.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/mla/sm90_tile.cuh>

namespace flashinfer::cuda::sm90 {

template <typename T, int kGroup, typename Track>
struct MlaGatheredConsumer : MlaConsumer<T, kGroup, true, Track> {
  using Base = MlaConsumer<T, kGroup, true, Track>;
  using Base::Base;
  using Base::multiply_other, Base::multiply_own, Base::release, Base::rescale, Base::store_weights;
  using Base::o, Base::shared, Base::sum, Base::receive_row_maxima, Base::exponentiate, Base::z, Base::zero;
  using Base::profiler;

  template <bool kLast>
  __device__ __forceinline__ void attend_left(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float own[2] = {1, 1}, others[2] = {1, 1};
    profiler.switch_to(Event::kSoftmax);
    const bool raised = exponentiate(2 * pair, p, own);
    store_weights(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaWeightsA);
    if (raised) rescale(own);
    profiler.switch_to(Event::kGemmPv);
    multiply_own(p);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    profiler.switch_to(Event::kWaitWeights);
    release(kBlockA);
    ptx::named_barrier<256>(kMlaWeightsB);
    if (receive_row_maxima(others)) {
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
    profiler.switch_to(Event::kWaitMaxima);
    ptx::named_barrier<256>(kMlaMaximaA);
    profiler.switch_to(Event::kSoftmax);
    const bool other = receive_row_maxima(others);
    sum[0] *= others[0], sum[1] *= others[1];
    exponentiate(2 * pair + 1, p, own);
    store_weights(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaWeightsB);
    if (other) rescale(others);
    profiler.switch_to(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaWeightsA);
    profiler.switch_to(Event::kGemmPv);
    // P_a is relative to the row_max from before a warp of this warpgroup raised it. All four warps branch
    // alike, because a product belongs to the whole warpgroup.
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
      release(kBlockA);
      release(kBlockB);
    } else {
      multiply_other();
      multiply_own(p);
      ptx::warpgroup_wait<1>();
      release(kBlockA);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
      ptx::warpgroup_hold(p);
      release(kBlockB);
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
