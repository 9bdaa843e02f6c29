// Mainloop of a consumer warpgroup if rows are gathered. Left and right are those of sm90_tile.cuh. For each
// pair of blocks a, b:
//
//   left                                                  right
//   m over a and P_a, sent to right                       receives m of left; m over b and P_b, sent to left
//   O += P_a V_a, P_a in registers                        O += P_a V_a
//   receives m of right; O += P_b V_b                     O += P_b V_b, P_b in registers
//   S of the next a                                       S of the next b
//
// Each warpgroup stores P to smem before it rescales O. P is relative to the sender's m, so right adds P_a
// V_a before it rescales O for maxima that it has raised itself.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/mla/sm90_tile.cuh>

namespace flashinfer::cuda::sm90 {

template <typename T, int kGroup, typename Track>
struct MlaGatheredConsumer : MlaConsumer<T, kGroup, true, Track> {
  using Base = MlaConsumer<T, kGroup, true, Track>;
  using Base::Base;
  using Base::multiply_other, Base::multiply_own, Base::release, Base::rescale, Base::store_p;
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
    store_p(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaPReadyA);
    if (raised) rescale(own);
    profiler.switch_to(Event::kGemmPv);
    multiply_own(p);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    profiler.switch_to(Event::kWaitWeights);
    release(kBlockA);
    ptx::named_barrier<256>(kMlaPReadyB);
    if (receive_row_maxima(others)) {
      rescale(others);
      sum[0] *= others[0], sum[1] *= others[1];
    }
    this->template finish_left<kLast>(pair, parity);
  }

  template <bool kLast>
  __device__ __forceinline__ void attend_right(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float own[2] = {1, 1}, others[2] = {1, 1};
    profiler.switch_to(Event::kWaitMaxima);
    ptx::named_barrier<256>(kMlaMaxReadyA);
    profiler.switch_to(Event::kSoftmax);
    const bool other = receive_row_maxima(others);
    sum[0] *= others[0], sum[1] *= others[1];
    exponentiate(2 * pair + 1, p, own);
    store_p(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaPReadyB);
    if (other) rescale(others);
    profiler.switch_to(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaPReadyA);
    profiler.switch_to(Event::kGemmPv);
    // If this warpgroup has raised m, P_a is relative to the older m. The branch is uniform over the four
    // warps, because a wgmma belongs to the whole warpgroup.
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
    if constexpr (!kLast) this->next_s_right(pair, parity);
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
