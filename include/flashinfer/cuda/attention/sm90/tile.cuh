// What a warpgroup computes: its rows' attention to an item's tiles of keys, the products of one tile under way while
// the softmax of the next is computed.
#pragma once

#include <cstdint>

#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/sm90/gather.cuh>
#include <flashinfer/cuda/attention/sm90/rows.cuh>
#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/attention/sm90/softmax.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda::sm90 {

template <typename T>
constexpr ptx::WgmmaType wgmma_type() {
  return __is_same(T, bfloat16_t)   ? ptx::WgmmaType::kBF16
         : __is_same(T, half_t)     ? ptx::WgmmaType::kF16
         : __is_same(T, fp8_e4m3_t) ? ptx::WgmmaType::kE4M3
                                    : ptx::WgmmaType::kE5M2;
}

template <typename Variant, typename S, typename P>
struct GroupTile {
  using T = typename S::DTypeQ;
  static constexpr ptx::WgmmaType kType = wgmma_type<T>();
  // Weights of 8 bits are e4m3, whatever values are.
  static constexpr ptx::WgmmaType kWeightType = kType == ptx::WgmmaType::kE5M2 ? ptx::WgmmaType::kE4M3E5M2 : kType;
  const P& params;
  const Shared<S>& shared;
  const Work& work;
  const Variant& variant;
  const int group, query_use;
  int use;  // of the next tile of keys and of values
  Softmax<S::kFp8> softmax;
  float o[S::kDV / 2];
  Profiler<P::kProfiler>& profiler;

  // All tiles of the item, from the last to the first. Those that no row sees are waited for, and released.
  __device__ __forceinline__ void attend(const TileRange& range) {
    const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
#pragma unroll
    for (int i = 0; i < S::kDV / 2; ++i) o[i] = 0;
    int32_t tile = work.tiles - 1;
    for (; tile >= range.end; --tile) skip();
    if (tile >= range.first) {
      float s[S::kKeys / 2];
      uint32_t p[S::kWeightRegisters];
      profiler.turn(Event::kWaitKeys);
      wait_for_tile(key_ring, use);
      profiler.turn(Event::kGemmQk);
      multiply_keys(s);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(s);
      release(key_ring, use);
      profiler.turn(Event::kSoftmax);
      prepare_logits<true, Variant, S>(s, params, variant, work, tile, softmax.logits);
      weigh(s);
      pack_weights(p, s);
      --tile;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const int32_t border = part == 0 ? max(range.whole_end, range.first) : range.first;
#pragma unroll 1
        for (; tile >= border; --tile) step<true>(s, p, tile);
#pragma unroll 1
        for (; tile >= max(range.whole_first, range.first) && part == 0; --tile) step<false>(s, p, tile);
      }
      release(shared.query_ring(), query_use);
      profiler.turn(Event::kWaitValues);
      wait_for_tile(value_ring, use);
      profiler.turn(Event::kGemmPv);
      multiply_values(p);
      ptx::warpgroup_wait<0>();
      ptx::warpgroup_hold(o);
      release(value_ring, use);
      ++use;
    } else if (work.tiles > 0) {
      release(shared.query_ring(), query_use);
    }
    for (; tile >= 0; --tile) skip();
  }

 private:
  template <typename R>
  __device__ __forceinline__ static void release(const R& ring, int use) {
    if (threadIdx.x % 32 == 0) ring.release(use);
  }

  // Gathered tiles were written as ordinary stores are.
  __device__ __forceinline__ void wait_for_tile(const typename S::KeyRing& ring, int use) const {
    ring.wait_full(use);
    if (is_gathered(params.kv)) ptx::fence_proxy_async();
  }

  __device__ __forceinline__ void skip() {
    const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
    key_ring.wait_full(use);
    release(key_ring, use);
    value_ring.wait_full(use);
    release(value_ring, use);
    ++use;
  }

  // s = q k^T of the tile at `at`
  __device__ __forceinline__ void multiply_keys(float (&s)[S::kKeys / 2], int ahead = 0) const {
    const uint64_t a = S::Queries::k_contiguous(shared.queries(query_use) + group * 64 * S::kWidth);
    const uint64_t b = S::Keys::k_contiguous(shared.keys(use + ahead));
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kDQ * S::kElement / 32; ++i)
      ptx::Wgmma<S::kKeys>::template ss<kType, false>(s, a + S::Queries::k_contiguous_step(i),
                                                      b + S::Keys::k_contiguous_step(i), i > 0);
    ptx::warpgroup_commit();
  }

  // o += p v
  __device__ __forceinline__ void multiply_values(const uint32_t (&p)[S::kWeightRegisters]) {
    using V = typename S::Transposed;
    const uint64_t b = S::kFp8 ? V::k_contiguous(shared.values(use)) : S::Keys::n_contiguous(shared.values(use));
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kWeightRegisters / 4; ++i)
      ptx::Wgmma<S::kDV>::template rs<kWeightType, !S::kFp8>(
          o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
          b + (S::kFp8 ? V::k_contiguous_step(i) : S::Keys::n_contiguous_step(i)), true);
    ptx::warpgroup_commit();
  }

  __device__ __forceinline__ static void pack_weights(uint32_t (&p)[S::kWeightRegisters],
                                                      const float (&s)[S::kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < S::kWeightRegisters; ++i) {
      if constexpr (S::kFp8) {
        // Four keys of a row, in the order in which transposed values have them.
        const int at = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
        p[i] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
      } else {
        p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
      }
    }
  }

  // Returns whether outputs are to be rescaled.
  __device__ __forceinline__ bool weigh(float (&s)[S::kKeys / 2]) {
    if constexpr (!Variant::use_softmax) return false;
    const bool raised = softmax.raise(s);
    softmax.weigh(s);
    return raised;
  }

  // Keys of `tile` beside values of the tile before, whose weights are in p. All products are waited for within it.
  template <bool kBorder>
  __device__ __forceinline__ void step(float (&s)[S::kKeys / 2], uint32_t (&p)[S::kWeightRegisters], int32_t tile) {
    const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
    profiler.turn(Event::kWaitKeys);
    wait_for_tile(key_ring, use + 1);
    multiply_keys(s, 1);
    profiler.turn(Event::kWaitValues);
    wait_for_tile(value_ring, use);
    multiply_values(p);
    profiler.turn(Event::kGemmQk);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(s);
    release(key_ring, use + 1);
    profiler.turn(Event::kSoftmax);
    prepare_logits<kBorder, Variant, S>(s, params, variant, work, tile, softmax.logits);
    const bool raised = weigh(s);
    profiler.turn(Event::kGemmPv);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    release(value_ring, use);
    if (raised) softmax.rescale(o);
    pack_weights(p, s);
    ++use;
  }
};

}  // namespace flashinfer::cuda::sm90
