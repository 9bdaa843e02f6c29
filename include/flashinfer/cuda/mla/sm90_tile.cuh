// What a warpgroup of the Hopper kernel computes. For a pair of blocks, a and b:
//
//   warpgroup 0, columns 0-255                            warpgroup 1, columns 256-511
//   maxima of a, told to 1; weights of a                  takes 0's references; maxima of b, told to 0; weights of b
//   O += P_a V_a from registers                           P_b to shared memory; O += P_b V_b from registers
//   takes 1's references; P_a to shared memory            O += P_a V_a
//   O += P_b V_b; logits of the next a                    logits of the next b
//
// Weights are relative to a reference of the row that is raised, and what was summed is rescaled, only when a weight
// would pass 2^8: mostly in the first blocks.
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
struct MlaGroup {
  static constexpr ptx::WgmmaType kType = ptx::kWgmmaType<T>;

  const MlaParams& params;
  const MlaShared& shared;
  const WorkItem& item;
  const MlaRows& rows;
  const int zero;  // 0, which the compiler does not know: what depends on it is not kept in registers over the loop
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int row = warp * 16 + lane / 4;  // and row + 8
  uint32_t z = 0;
  int32_t end[2], border;  // what rows see; the first block of which a row does not see all
  float reference[2] = {-math::inf, -math::inf}, sum[2] = {0, 0};
  uint32_t rope[4][4];
  float s[32], o[128];
  Track& profiler;

  __device__ __forceinline__ MlaGroup(const MlaParams& p, const MlaShared& memory, const WorkItem& i, const MlaRows& r,
                                      int nothing, Track& track)
      : params(p), shared(memory), item(i), rows(r), zero(nothing), profiler(track) {
    end[0] = rows.end(row), end[1] = rows.end(row + 8);
    border = max(0, rows.end(0) - item.kv_start) / kMlaKeys;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const bool there = row + 8 * x < rows.count;
      const T* from = rows.pe<T>(there ? row + 8 * x : 0) + 2 * (lane % 4);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const auto* pairs = reinterpret_cast<const uint32_t*>(from + 16 * step);
        rope[step][x] = there ? pairs[0] : 0, rope[step][2 + x] = there ? pairs[4] : 0;
      }
    }
  }

  // Behind the loads of what a thread has of the queries in registers, so that both are under way together.
  __device__ __forceinline__ void wait_for_queries() const {
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier<256>(kMlaMaximaA);
  }

  // Keys that were copied behind the item's end may be anything, and as values 0 times that is not always 0.
  __device__ __forceinline__ void clear_behind_end(int block, uint32_t parity) const {
    if constexpr (!kGather) {
      const int32_t count = item.kv_end - item.kv_start - block * kMlaKeys;
      if (count <= 0 || count >= kMlaKeys) return;
      for (int chunk = 0; chunk < kMlaChunks; ++chunk) ptx::mbarrier_wait(shared.full(kGroup, chunk), parity);
      const int units = (kMlaKeys - count) * 8;
      for (int i = static_cast<int>(threadIdx.x) % 128; i < units * (kMlaChunks - 1); i += 128)
        ptx::store_shared_16(shared.keys(kGroup) + i / units * MlaShared::kChunk + (count * 8 + i % units) * 16,
                             {0, 0, 0, 0});
      ptx::fence_proxy_async();
      ptx::named_barrier<128>(kMlaOwn + kGroup);
    }
  }

  // Logits: s (+)= queries * keys of chunks [from, to) of this warpgroup's block. kThen: what is waited for behind it.
  template <int kFrom, int kTo, bool kFirst, Event kThen = Event::kGemmQk>
  __device__ __forceinline__ void score(uint32_t parity) {
#pragma unroll
    for (int chunk = kFrom; chunk < kTo; ++chunk) {
      if (chunk == kFrom) profiler.turn(Event::kWaitKeys);
      ptx::mbarrier_wait(shared.full(kGroup, chunk), parity);
      if (chunk == kFrom) profiler.turn(kThen);
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
    return MlaChunk::n_contiguous(shared.keys(buffer) + kGroup * kMlaLeft * MlaShared::kChunk + z);
  }
  __device__ __forceinline__ void multiply_own(const uint32_t (&p)[16]) {
    const uint64_t v = values(kGroup);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::Wgmma<256>::rs<kType, true>(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                       v + MlaChunk::n_contiguous_step(step), true);
    ptx::warpgroup_commit();
  }
  __device__ __forceinline__ void multiply_other() {
    const uint64_t v = values(1 - kGroup), p = MlaChunk::k_contiguous(shared.weights(1 - kGroup) + z);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::Wgmma<256>::ss<kType, true>(o, p + MlaChunk::k_contiguous_step(step), v + MlaChunk::n_contiguous_step(step),
                                       true);
    ptx::warpgroup_commit();
  }

  __device__ __forceinline__ void store_weights(const uint32_t (&p)[16]) const {
    const int at = warp * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::stmatrix_x4(shared.weights(kGroup) + MlaChunk::unit(at, 2 * step + lane / 16), p[4 * step], p[4 * step + 1],
                       p[4 * step + 2], p[4 * step + 3]);
  }
  __device__ __forceinline__ void rescale(const float (&by)[2]) {
#pragma unroll
    for (int e = 0; e < 128; ++e) o[e] *= by[e / 2 % 2];
  }

  // Frees one side of a block, of which this warp's products are done.
  __device__ __forceinline__ void release(int buffer, int side = kGroup) const {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty(buffer, side));
  }

  __device__ __forceinline__ void hide(int block) {
    const int32_t key = item.kv_start + block * kMlaKeys + 2 * (lane % 4);
#pragma unroll
    for (int e = 0; e < 32; ++e)
      if (key + 8 * (e / 4) + e % 2 >= end[e / 2 % 2]) s[e] = -math::inf;
  }

  // Logits become weights. Returns whether references were raised; `factor` is multiplied by what for.
  __device__ __forceinline__ bool weigh(int block, uint32_t (&p)[16], float (&factor)[2]) {
    if constexpr (kGather) release(kGroup, 2);
    if (block >= border) hide(block);
    const float scale = params.sm_scale_log2;
    float top[2] = {-math::inf, -math::inf};
#pragma unroll
    for (int e = 0; e < 32; ++e) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], s[e]);
    // The difference of two infinities is no number, and not larger.
    const bool raise =
        __any_sync(kAllLanes, (top[0] - reference[0]) * scale > 8.0f || (top[1] - reference[1]) * scale > 8.0f);
    if (raise) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float now = fmaxf(quad_max(top[x]), reference[x]);
        const float by = now == -math::inf ? 1.0f : math::ptx_exp2((reference[x] - now) * scale);
        reference[x] = now, factor[x] *= by;
        if (lane % 4 == 0) shared.factors(kGroup)[row + 8 * x] = by, shared.references()[row + 8 * x] = now;
      }
    }
    if (lane == 0) shared.raised(kGroup)[warp] = raise;
    if constexpr (kGroup == 0 || !kGather) ptx::named_barrier_arrive<256>(kGroup == 0 ? kMlaMaximaA : kMlaMaximaB);
    const float base[2] = {reference[0] == -math::inf ? 0.0f : reference[0] * scale,
                           reference[1] == -math::inf ? 0.0f : reference[1] * scale};
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

  // What the other warpgroup raised.
  __device__ __forceinline__ bool take_references(float (&factor)[2]) {
    if (!shared.raised(1 - kGroup)[warp]) return false;
#pragma unroll
    for (int x = 0; x < 2; ++x)
      factor[x] = shared.factors(1 - kGroup)[row + 8 * x], reference[x] = shared.references()[row + 8 * x];
    return true;
  }

  // Warpgroup 0's products with the other's weights, and logits of the next pair, if there is one.
  template <bool kLast>
  __device__ __forceinline__ void end_left(int pair, uint32_t parity) {
    if constexpr (kLast) {
      profiler.turn(Event::kGemmPv);
      multiply_other();
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
    } else {
      clear_behind_end(2 * pair + 2, parity);
      multiply_other();
      score<0, kMlaLeft, true, Event::kGemmPv>(parity);
      ptx::warpgroup_wait<1>();
      ptx::warpgroup_hold(o);
      release(1);
      score<kMlaLeft, kMlaChunks, false>(parity);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(s);
    }
  }

  // Warpgroup 1's logits of the next pair.
  __device__ __forceinline__ void score_right(int pair, uint32_t parity) {
    clear_behind_end(2 * pair + 3, parity);
    score<kMlaLeft, kMlaChunks, true>(parity);
    score<0, kMlaLeft, false>(parity);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
  }

  // A pair of blocks, and logits of the next one; behind the last pair there is none.
  template <bool kLast>
  __device__ __forceinline__ void attend_left(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float factor[2] = {1, 1}, others[2] = {1, 1};
    profiler.turn(Event::kSoftmax);
    if (weigh(2 * pair, p, factor)) rescale(factor);
    profiler.turn(Event::kGemmPv);
    multiply_own(p);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    profiler.turn(Event::kWaitMaxima);
    release(0);
    ptx::named_barrier<256>(kMlaMaximaB);
    const bool other = take_references(others);
    if (other) {
#pragma unroll
      for (int e = 0; e < 32; e += 2) p[e / 2] = pack<T>(s[e] * others[e / 2 % 2], s[e + 1] * others[e / 2 % 2]);
    }
    store_weights(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaWeightsA);
    profiler.turn(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaWeightsB);
    if (other) {
      rescale(others);
      sum[0] *= others[0], sum[1] *= others[1];
    }
    end_left<kLast>(pair, parity);
  }

  template <bool kLast>
  __device__ __forceinline__ void attend_right(int pair) {
    z = static_cast<uint32_t>(zero * pair);
    const uint32_t parity = static_cast<uint32_t>(pair + 1) & 1;
    uint32_t p[16];
    float factor[2] = {1, 1};
    profiler.turn(Event::kWaitMaxima);
    ptx::named_barrier<256>(kMlaMaximaA);
    profiler.turn(Event::kSoftmax);
    const bool other = take_references(factor);
    const bool own = weigh(2 * pair + 1, p, factor);
    store_weights(p);
    if (own || other) rescale(factor);
    multiply_own(p);
    ptx::fence_proxy_async();
    profiler.turn(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaWeightsA);
    profiler.turn(Event::kGemmPv);
    multiply_other();
    ptx::named_barrier_arrive<256>(kMlaWeightsB);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(p);
    if constexpr (!kLast) release(1);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    if constexpr (!kLast) {
      release(0);
      score_right(pair, parity);
    }
  }

  // The first pair's logits.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int e = 0; e < 128; ++e) o[e] = 0;
#pragma unroll
    for (int e = 0; e < 32; ++e) s[e] = 0;
    ptx::warpgroup_hold(o);
    wait_for_queries();
    clear_behind_end(kGroup, 0);
    if constexpr (kGroup == 0) {
      score<0, kMlaChunks, true>(0);
    } else {
      score<kMlaLeft, kMlaChunks, true>(0);
      score<0, kMlaLeft, false>(0);
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

  // Outputs through the memory of the keys, so that a row is written by a warp at once.
  __device__ __forceinline__ void write() {
    profiler.turn(Event::kWriteOutput);
    float share[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) sum[x] = quad_sum(sum[x]);
    ptx::named_barrier<256>(kMlaMaximaA);  // the other's products are done, and nobody reads factors any more
    if (lane % 4 == 0) shared.factors(kGroup)[row] = sum[0], shared.factors(kGroup)[row + 8] = sum[1];
    ptx::named_barrier<256>(kMlaMaximaB);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const float l = shared.factors(0)[row + 8 * x] + shared.factors(1)[row + 8 * x];
      share[x] = item.slot >= 0 ? 1.0f : l == 0 ? 0.0f : math::ptx_rcp(l) * params.o_scale;
      if (kGroup == 0 && lane % 4 == 0 && row + 8 * x < rows.count) rows.write_softmax(row + 8 * x, reference[x], l);
    }
    rescale(share);
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
    // Rows of 512 bytes, their units swizzled.
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

// An item. Its last pair of blocks is code of its own: products are not issued under a condition in a loop.
template <typename Group>
__device__ __forceinline__ void mla_attend(Group&& group, int pairs) {
  group.begin();
#pragma unroll 1
  for (int pair = 0; pair + 1 < pairs; ++pair) group.template attend<false>(pair);
  group.template attend<true>(pairs - 1);
  group.write();
}

}  // namespace flashinfer::cuda::sm90
