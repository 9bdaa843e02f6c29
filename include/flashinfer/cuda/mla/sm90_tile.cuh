// Mainloop of a consumer warpgroup of multi-head latent attention. Warpgroup 0 is "left": it computes S of
// block a and columns 0-255 of O. Warpgroup 1 is "right": it computes S of block b and columns 256-511. For
// each pair a, b:
//
//   left                                                  right
//   m over a, sent to right; P_a                          receives m of left; m over b, sent to left; P_b
//   O += P_a V_a, P_a in registers                        stores P_b to smem; O += P_b V_b, P_b in registers
//   receives m of right; stores P_a to smem               O += P_a V_a
//   O += P_b V_b; S of the next a                         S of the next b
//
// P = 2^(S - m). m (row_max) is updated lazily: only if an element of P would exceed 2^8. O and l are then
// rescaled. That happens mostly in the first blocks.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/cuda/mla/rows.cuh>
#include <flashinfer/cuda/mla/sm90_shape.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda::sm90 {

template <typename T, int kGroup, bool kGather, typename Track>
struct MlaConsumer {
  static constexpr ptx::WgmmaType kType = ptx::kWgmmaType<T>;

  const MlaParams& params;
  const MlaShared& shared;
  const WorkItem& item;
  const MlaRows& rows;
  const int zero;  // 0, but the compiler does not know it, see `z`
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int row = warp * 16 + lane / 4;  // and row + 8
  uint32_t z = 0;  // zero * pair: the compiler recomputes addresses per pair instead of holding them in registers
  int32_t end[2], first_masked_block;  // end of the visible keys of each row; first block that needs a mask
  float row_max[2] = {-math::inf, -math::inf}, sum[2] = {0, 0};
  uint32_t rope[4][4];
  float s[32], o[128];
  Track& profiler;

  __device__ __forceinline__ MlaConsumer(const MlaParams& p, const MlaShared& memory, const WorkItem& i,
                                         const MlaRows& r, int zero_, Track& track)
      : params(p), shared(memory), item(i), rows(r), zero(zero_), profiler(track) {
    end[0] = rows.end(row), end[1] = rows.end(row + 8);
    first_masked_block = max(0, rows.end(0) - item.kv_start) / kMlaKeys;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const bool exists = row + 8 * x < rows.count;
      const T* from = rows.pe<T>(exists ? row + 8 * x : 0) + 2 * (lane % 4);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const auto* pairs = reinterpret_cast<const uint32_t*>(from + 16 * step);
        rope[step][x] = exists ? pairs[0] : 0, rope[step][2 + x] = exists ? pairs[4] : 0;
      }
    }
  }

  // Called after the thread has started to load its rotary queries into registers, so both latencies overlap.
  __device__ __forceinline__ void wait_for_queries() const {
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier<256>(kMlaMaxReadyA);
  }

  // Clear keys after the end of the item. As values they may be NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void clear_after_end(int block, uint32_t parity) const {
    if constexpr (!kGather) {
      const int32_t count = item.kv_end - item.kv_start - block * kMlaKeys;
      if (count <= 0 || count >= kMlaKeys) return;
      for (int chunk = 0; chunk < kMlaChunks; ++chunk) ptx::mbarrier_wait(shared.full(kGroup, chunk), parity);
      const int units = (kMlaKeys - count) * 8;
      for (int i = static_cast<int>(threadIdx.x) % 128; i < units * (kMlaChunks - 1); i += 128)
        ptx::store_shared_16(shared.keys(kGroup) + i / units * MlaShared::kChunk + (count * 8 + i % units) * 16,
                             {0, 0, 0, 0});
      ptx::fence_proxy_async();
      ptx::named_barrier<128>(kMlaConsumer + kGroup);
    }
  }

  // S (+)= Q K^T over chunks [kFrom, kTo) of this warpgroup's block. kFirst: S starts at 0. kThen: the
  // event recorded after the wait for keys.
  template <int kFrom, int kTo, bool kFirst, Event kThen = Event::kGemmQk>
  __device__ __forceinline__ void multiply_keys(uint32_t parity) {
#pragma unroll
    for (int chunk = kFrom; chunk < kTo; ++chunk) {
      if (chunk == kFrom) profiler.switch_to(Event::kWaitKeys);
      ptx::mbarrier_wait(shared.full(kGroup, chunk), parity);
      if (chunk == kFrom) profiler.switch_to(kThen);
      if (kGather) ptx::fence_proxy_async();
      const uint64_t q = MlaChunk::k_contiguous(shared.queries() + z);
      const uint64_t k = MlaChunk::k_contiguous(shared.keys(kGroup) + z);
      ptx::warpgroup_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const uint64_t at = MlaChunk::k_contiguous_step(chunk * 4 + step);
        if (chunk < kMlaChunks - 1) {
          ptx::Wgmma<64>::ss<kType, false>(s, q + at, k + at, !(kFirst && chunk == kFrom && step == 0));
        } else {
          ptx::Wgmma<64>::rs<kType, false>(s, rope[step][0], rope[step][1], rope[step][2], rope[step][3], k + at, true);
        }
      }
    }
    ptx::warpgroup_commit();
  }

  __device__ __forceinline__ uint64_t values(int buffer) const {
    return MlaChunk::n_contiguous(shared.keys(buffer) + kGroup * kMlaSideChunks * MlaShared::kChunk + z);
  }
  // O += P V for this warpgroup's own block, with P in registers.
  __device__ __forceinline__ void multiply_own(const uint32_t (&p)[16]) {
    const uint64_t v = values(kGroup);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::Wgmma<256>::rs<kType, true>(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                       v + MlaChunk::n_contiguous_step(step), true);
    ptx::warpgroup_commit();
  }
  // O += P V for the block of the other warpgroup, with P in smem.
  __device__ __forceinline__ void multiply_other() {
    const uint64_t v = values(1 - kGroup), p = MlaChunk::k_contiguous(shared.p(1 - kGroup) + z);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::Wgmma<256>::ss<kType, true>(o, p + MlaChunk::k_contiguous_step(step), v + MlaChunk::n_contiguous_step(step),
                                       true);
    ptx::warpgroup_commit();
  }

  __device__ __forceinline__ void store_p(const uint32_t (&p)[16]) const {
    const int at = warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::stmatrix_x4(shared.p(kGroup) + MlaChunk::unit(at, 2 * step + lane / 16), p[4 * step], p[4 * step + 1],
                       p[4 * step + 2], p[4 * step + 3]);
  }
  __device__ __forceinline__ void rescale(const float (&factors)[2]) {
#pragma unroll
    for (int e = 0; e < 128; ++e) o[e] *= factors[e / 2 % 2];
  }

  // Release one side of a block after this warp's last wgmma that reads it.
  __device__ __forceinline__ void release(int buffer, int side = kGroup) const {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty(buffer, side));
  }

  __device__ __forceinline__ void mask_keys(int block) {
    const int32_t key = item.kv_start + block * kMlaKeys + 2 * (lane % 4);
#pragma unroll
    for (int e = 0; e < 32; ++e)
      if (key + 8 * (e / 4) + e % 2 >= end[e / 2 % 2]) s[e] = -math::inf;
  }

  // Replace S by P and pack it. If a row maximum is raised, return true and multiply `factor` by the
  // factor that rescales O.
  __device__ __forceinline__ bool exponentiate(int block, uint32_t (&p)[16], float (&factor)[2]) {
    if constexpr (kGather) release(kGroup, kMlaRopeSide);
    if (block >= first_masked_block) mask_keys(block);
    const float scale = params.sm_scale_log2;
    float tile_max[2] = {-math::inf, -math::inf};
#pragma unroll
    for (int e = 0; e < 32; ++e) tile_max[e / 2 % 2] = fmaxf(tile_max[e / 2 % 2], s[e]);
    // -inf - -inf is NaN, and NaN > 8 is false.
    const bool raise =
        __any_sync(kAllLanes, (tile_max[0] - row_max[0]) * scale > 8.0f || (tile_max[1] - row_max[1]) * scale > 8.0f);
    if (raise) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float now = fmaxf(quad_max(tile_max[x]), row_max[x]);
        const float factor_now = now == -math::inf ? 1.0f : math::ptx_exp2((row_max[x] - now) * scale);
        row_max[x] = now, factor[x] *= factor_now;
        if (lane % 4 == 0) shared.factors(kGroup)[row + 8 * x] = factor_now, shared.row_maxima()[row + 8 * x] = now;
      }
    }
    if (lane == 0) shared.raised(kGroup)[warp] = raise;
    if constexpr (kGroup == 0 || !kGather) ptx::named_barrier_arrive<256>(kGroup == 0 ? kMlaMaxReadyA : kMlaMaxReadyB);
    const float base[2] = {row_max[0] == -math::inf ? 0.0f : row_max[0] * scale,
                           row_max[1] == -math::inf ? 0.0f : row_max[1] * scale};
    sum[0] *= factor[0], sum[1] *= factor[1];
#pragma unroll
    for (int e = 0; e < 32; e += 2) {
      const int x = e / 2 % 2;
      s[e] = math::ptx_exp2(fmaf(s[e], scale, -base[x])), s[e + 1] = math::ptx_exp2(fmaf(s[e + 1], scale, -base[x]));
      sum[x] += s[e] + s[e + 1];
      p[e / 2] = pack<T>(s[e], s[e + 1]);
    }
    return raise;
  }

  // Receive row maxima that the other warpgroup has raised. Return true if there are any.
  __device__ __forceinline__ bool receive_row_maxima(float (&factor)[2]) {
    if (!shared.raised(1 - kGroup)[warp]) return false;
#pragma unroll
    for (int x = 0; x < 2; ++x)
      factor[x] = shared.factors(1 - kGroup)[row + 8 * x], row_max[x] = shared.row_maxima()[row + 8 * x];
    return true;
  }

  // Left: O += P_b V_b, overlapped with S of the next a unless this pair is the last.
  template <bool kLast>
  __device__ __forceinline__ void finish_left(int pair, uint32_t parity) {
    if constexpr (kLast) {
      profiler.switch_to(Event::kGemmPv);
      multiply_other();
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
    } else {
      clear_after_end(2 * pair + 2, parity);
      multiply_other();
      multiply_keys<0, kMlaSideChunks, true, Event::kGemmPv>(parity);
      ptx::warpgroup_wait<1>();
      ptx::warpgroup_hold(o);
      release(kBlockB);
      multiply_keys<kMlaSideChunks, kMlaChunks, false>(parity);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(s);
    }
  }

  // Right: S of the next b.
  __device__ __forceinline__ void next_s_right(int pair, uint32_t parity) {
    clear_after_end(2 * pair + 3, parity);
    multiply_keys<kMlaSideChunks, kMlaChunks, true>(parity);
    multiply_keys<0, kMlaSideChunks, false>(parity);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
  }

  // Left: one pair of blocks.
  template <bool kLast>
  __device__ __forceinline__ void attend_left(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float factor[2] = {1, 1}, others[2] = {1, 1};
    profiler.switch_to(Event::kSoftmax);
    if (exponentiate(2 * pair, p, factor)) rescale(factor);
    profiler.switch_to(Event::kGemmPv);
    multiply_own(p);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    profiler.switch_to(Event::kWaitMaxima);
    release(kBlockA);
    ptx::named_barrier<256>(kMlaMaxReadyB);
    const bool other = receive_row_maxima(others);
    if (other) {
#pragma unroll
      for (int e = 0; e < 32; e += 2) p[e / 2] = pack<T>(s[e] * others[e / 2 % 2], s[e + 1] * others[e / 2 % 2]);
    }
    store_p(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaPReadyA);
    profiler.switch_to(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaPReadyB);
    if (other) {
      rescale(others);
      sum[0] *= others[0], sum[1] *= others[1];
    }
    finish_left<kLast>(pair, parity);
  }

  // Right: one pair of blocks.
  template <bool kLast>
  __device__ __forceinline__ void attend_right(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float factor[2] = {1, 1};
    profiler.switch_to(Event::kWaitMaxima);
    ptx::named_barrier<256>(kMlaMaxReadyA);
    profiler.switch_to(Event::kSoftmax);
    const bool other = receive_row_maxima(factor);
    const bool own = exponentiate(2 * pair + 1, p, factor);
    store_p(p);
    if (own || other) rescale(factor);
    multiply_own(p);
    ptx::fence_proxy_async();
    profiler.switch_to(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaPReadyA);
    profiler.switch_to(Event::kGemmPv);
    multiply_other();
    ptx::named_barrier_arrive<256>(kMlaPReadyB);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(p);
    if constexpr (!kLast) release(kBlockB);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    if constexpr (!kLast) {
      release(kBlockA);
      next_s_right(pair, parity);
    }
  }

  // Prologue: S of the first pair.
  __device__ __forceinline__ void prologue() {
#pragma unroll
    for (int e = 0; e < 128; ++e) o[e] = 0;
#pragma unroll
    for (int e = 0; e < 32; ++e) s[e] = 0;
    ptx::warpgroup_hold(o);
    wait_for_queries();
    clear_after_end(kGroup, 0);
    if constexpr (kGroup == 0) {
      multiply_keys<0, kMlaChunks, true>(0);
    } else {
      multiply_keys<kMlaSideChunks, kMlaChunks, true>(0);
      multiply_keys<0, kMlaSideChunks, false>(0);
    }
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
  }

  template <bool kLast>
  __device__ __forceinline__ void attend(int pair) {
    if constexpr (kGroup == 0) {
      attend_left<kLast>(pair);
    } else {
      attend_right<kLast>(pair);
    }
  }

  // Epilogue: stores O through the smem of the keys, so a warp stores whole rows.
  __device__ __forceinline__ void epilogue() {
    profiler.switch_to(Event::kWriteOutput);
    float out_factor[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) sum[x] = quad_sum(sum[x]);
    ptx::named_barrier<256>(kMlaMaxReadyA);  // the other warpgroup has finished its products and reads no factors
    if (lane % 4 == 0) shared.factors(kGroup)[row] = sum[0], shared.factors(kGroup)[row + 8] = sum[1];
    ptx::named_barrier<256>(kMlaMaxReadyB);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      float l = shared.factors(0)[row + 8 * x] + shared.factors(1)[row + 8 * x], base = rows.base(row_max[x], l);
      const float rescale = rows.add_sink(row + 8 * x, base, l);
      out_factor[x] = item.slot >= 0 ? 1.0f : l == 0 ? 0.0f : rescale * math::ptx_rcp(l) * params.o_scale;
      if (kGroup == 0 && lane % 4 == 0 && row + 8 * x < rows.count) rows.write_softmax(row + 8 * x, base, l);
    }
    rescale(out_factor);
    if (item.slot >= 0) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        if (row + 8 * x >= rows.count) continue;
        float* to = rows.partial(row + 8 * x) + kGroup * 256 + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < 32; ++n) *reinterpret_cast<float2*>(to + 8 * n) = {o[4 * n + 2 * x], o[4 * n + 2 * x + 1]};
      }
      return;
    }
    // Rows have 512 bytes, with swizzled 16-byte units.
    const uint32_t start = shared.keys(kGroup);
    const int at = warp * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < 16; ++n)
      ptx::stmatrix_x4(start + at * 512 + (((2 * n + lane / 16) ^ (at & 7)) * 16), pack<T>(o[8 * n], o[8 * n + 1]),
                       pack<T>(o[8 * n + 2], o[8 * n + 3]), pack<T>(o[8 * n + 4], o[8 * n + 5]),
                       pack<T>(o[8 * n + 6], o[8 * n + 7]));
    __syncwarp();
    for (int r = warp * 16; r < min(warp * 16 + 16, rows.count); ++r) {
      const uint4 unit = ptx::load_shared_16(start + r * 512 + ((lane ^ (r & 7)) * 16));
      *reinterpret_cast<uint4*>(rows.out<T>(r) + kGroup * 256 + lane * 8) = unit;
    }
  }
};

// Compute an item. The last pair is peeled off the loop, because no wgmma may be under a condition in the
// loop.
template <typename Group>
__device__ __forceinline__ void mla_attend(Group&& group, int pairs) {
  group.prologue();
#pragma unroll 1
  for (int pair = 0; pair + 1 < pairs; ++pair) group.template attend<false>(pair);
  group.template attend<true>(pairs - 1);
  group.epilogue();
}

}  // namespace flashinfer::cuda::sm90
