// The mainloop of a consumer warpgroup (S, P, O and lazy row maxima as in attention/sm90). For a pair of
// blocks, a and b:
//
//   warpgroup 0, columns 0-255                            warpgroup 1, columns 256-511
//   row_max of a, sent to 1; P_a                          receives row_max of 0; row_max of b, sent to 0; P_b
//   O += P_a V_a from registers                           P_b to shared memory; O += P_b V_b from registers
//   receives row_max of 1; P_a to shared memory           O += P_a V_a
//   O += P_b V_b; S of the next a                         S of the next b
//
// P is 2^(S - row_max). row_max is raised, and O and the row sums rescaled, only if an element of P would
// pass 2^8. That happens mostly in the first blocks.
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
  const int zero;  // 0, unknown to the compiler: dependent addresses are not held in registers over the mainloop
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32 % 4);
  const int row = warp * 16 + lane / 4;  // and row + 8
  uint32_t z = 0;
  int32_t end[2], border;  // end of the keys that rows see; the first block that some row does not see whole
  float row_max[2] = {-math::inf, -math::inf}, sum[2] = {0, 0};
  uint32_t rope[4][4];
  float s[32], o[128];
  Track& profiler;

  __device__ __forceinline__ MlaConsumer(const MlaParams& p, const MlaShared& memory, const WorkItem& i,
                                         const MlaRows& r, int nothing, Track& track)
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

  // Called after the loads of a thread's queries to registers have started, so that both latencies overlap.
  __device__ __forceinline__ void wait_for_queries() const {
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::named_barrier<256>(kMlaMaximaA);
  }

  // Clears keys after the item's end. They may be NaN, and as values 0 * NaN is NaN.
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

  // S (+)= Q K^T over chunks [from, to) of this warpgroup's block. kThen: the event after the wait for keys.
  template <int kFrom, int kTo, bool kFirst, Event kThen = Event::kGemmQk>
  __device__ __forceinline__ void score(uint32_t parity) {
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

  // Frees one side of a block after this warp's products.
  __device__ __forceinline__ void release(int buffer, int side = kGroup) const {
    if (lane == 0) ptx::mbarrier_arrive(shared.empty(buffer, side));
  }

  __device__ __forceinline__ void hide(int block) {
    const int32_t key = item.kv_start + block * kMlaKeys + 2 * (lane % 4);
#pragma unroll
    for (int e = 0; e < 32; ++e)
      if (key + 8 * (e / 4) + e % 2 >= end[e / 2 % 2]) s[e] = -math::inf;
  }

  // Replaces S by P. Returns true if row_max was raised, and multiplies `factor` by the rescaling of O.
  __device__ __forceinline__ bool exponentiate(int block, uint32_t (&p)[16], float (&factor)[2]) {
    if constexpr (kGather) release(kGroup, kMlaRopeSide);
    if (block >= border) hide(block);
    const float scale = params.sm_scale_log2;
    float top[2] = {-math::inf, -math::inf};
#pragma unroll
    for (int e = 0; e < 32; ++e) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], s[e]);
    // The difference of two infinities is NaN, and NaN is not larger.
    const bool raise =
        __any_sync(kAllLanes, (top[0] - row_max[0]) * scale > 8.0f || (top[1] - row_max[1]) * scale > 8.0f);
    if (raise) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float now = fmaxf(quad_max(top[x]), row_max[x]);
        const float by = now == -math::inf ? 1.0f : math::ptx_exp2((row_max[x] - now) * scale);
        row_max[x] = now, factor[x] *= by;
        if (lane % 4 == 0) shared.factors(kGroup)[row + 8 * x] = by, shared.row_maxima()[row + 8 * x] = now;
      }
    }
    if (lane == 0) shared.raised(kGroup)[warp] = raise;
    if constexpr (kGroup == 0 || !kGather) ptx::named_barrier_arrive<256>(kGroup == 0 ? kMlaMaximaA : kMlaMaximaB);
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

  // Receives the row maxima that the other warpgroup has raised.
  __device__ __forceinline__ bool receive_row_maxima(float (&factor)[2]) {
    if (!shared.raised(1 - kGroup)[warp]) return false;
#pragma unroll
    for (int x = 0; x < 2; ++x)
      factor[x] = shared.factors(1 - kGroup)[row + 8 * x], row_max[x] = shared.row_maxima()[row + 8 * x];
    return true;
  }

  // Warpgroup 0: P V with the other's P, and S of the next pair unless this is the last.
  template <bool kLast>
  __device__ __forceinline__ void end_left(int pair, uint32_t parity) {
    if constexpr (kLast) {
      profiler.switch_to(Event::kGemmPv);
      multiply_other();
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
    } else {
      clear_behind_end(2 * pair + 2, parity);
      multiply_other();
      score<0, kMlaSideChunks, true, Event::kGemmPv>(parity);
      ptx::warpgroup_wait<1>();
      ptx::warpgroup_hold(o);
      release(kBlockB);
      score<kMlaSideChunks, kMlaChunks, false>(parity);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(s);
    }
  }

  // Warpgroup 1: S of the next pair.
  __device__ __forceinline__ void score_right(int pair, uint32_t parity) {
    clear_behind_end(2 * pair + 3, parity);
    score<kMlaSideChunks, kMlaChunks, true>(parity);
    score<0, kMlaSideChunks, false>(parity);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
  }

  // Warpgroup 0: a pair of blocks, and S of the next pair unless this is the last.
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
    ptx::named_barrier<256>(kMlaMaximaB);
    const bool other = receive_row_maxima(others);
    if (other) {
#pragma unroll
      for (int e = 0; e < 32; e += 2) p[e / 2] = pack<T>(s[e] * others[e / 2 % 2], s[e + 1] * others[e / 2 % 2]);
    }
    store_weights(p);
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive<256>(kMlaWeightsA);
    profiler.switch_to(Event::kWaitWeights);
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
    profiler.switch_to(Event::kWaitMaxima);
    ptx::named_barrier<256>(kMlaMaximaA);
    profiler.switch_to(Event::kSoftmax);
    const bool other = receive_row_maxima(factor);
    const bool own = exponentiate(2 * pair + 1, p, factor);
    store_weights(p);
    if (own || other) rescale(factor);
    multiply_own(p);
    ptx::fence_proxy_async();
    profiler.switch_to(Event::kWaitWeights);
    ptx::named_barrier<256>(kMlaWeightsA);
    profiler.switch_to(Event::kGemmPv);
    multiply_other();
    ptx::named_barrier_arrive<256>(kMlaWeightsB);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(p);
    if constexpr (!kLast) release(kBlockB);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    if constexpr (!kLast) {
      release(kBlockA);
      score_right(pair, parity);
    }
  }

  // S of the first pair.
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
      score<kMlaSideChunks, kMlaChunks, true>(0);
      score<0, kMlaSideChunks, false>(0);
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

  // Epilogue: writes O through the memory of the keys, so that a warp writes whole rows.
  __device__ __forceinline__ void write() {
    profiler.switch_to(Event::kWriteOutput);
    float share[2];
#pragma unroll
    for (int x = 0; x < 2; ++x) sum[x] = quad_sum(sum[x]);
    ptx::named_barrier<256>(kMlaMaximaA);  // the other's products are complete, and factors are no longer read
    if (lane % 4 == 0) shared.factors(kGroup)[row] = sum[0], shared.factors(kGroup)[row + 8] = sum[1];
    ptx::named_barrier<256>(kMlaMaximaB);
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      float l = shared.factors(0)[row + 8 * x] + shared.factors(1)[row + 8 * x], base = rows.base(row_max[x], l);
      const float rescale = rows.add_sink(row + 8 * x, base, l);
      share[x] = item.slot >= 0 ? 1.0f : l == 0 ? 0.0f : rescale * math::ptx_rcp(l) * params.o_scale;
      if (kGroup == 0 && lane % 4 == 0 && row + 8 * x < rows.count) rows.write_softmax(row + 8 * x, base, l);
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

// Computes an item. The last pair has its own code: products must not be issued under a condition in a loop.
template <typename Group>
__device__ __forceinline__ void mla_attend(Group&& group, int pairs) {
  group.begin();
#pragma unroll 1
  for (int pair = 0; pair + 1 < pairs; ++pair) group.template attend<false>(pair);
  group.template attend<true>(pairs - 1);
  group.write();
}

}  // namespace flashinfer::cuda::sm90
