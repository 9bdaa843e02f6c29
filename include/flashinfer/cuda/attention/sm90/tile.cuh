// The mainloop of a consumer warpgroup: its 64 rows and an item's tiles of keys. O += P V of one tile runs on
// the tensor cores while the softmax of the next is computed (FlashAttention-3, arXiv 2407.08608, section
// 3.2).
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

template <typename Variant, typename S, typename P>
struct ConsumerWarpgroup {
  using T = typename S::DTypeQ;
  static constexpr ptx::WgmmaType kType = ptx::kWgmmaType<T>;
  // P of 8 bits is e4m3 for any type of values.
  static constexpr ptx::WgmmaType kWeightType = kType == ptx::WgmmaType::kE5M2 ? ptx::WgmmaType::kE4M3E5M2 : kType;
  // With variants, registers do not suffice for a second form of the first tile.
  static constexpr bool kHasHalfTile = !Variant::transforms_logits && !Variant::masks_logits;
  const P& params;
  const Shared<S>& shared;
  const Work& work;
  const Variant& variant;
  const int group, query_use;
  int use;  // of the next tile of keys and of values
  Softmax<S::kFp8> softmax;
  float o[S::kDV / 2];
  Profiler<P::kProfiler>& profiler;

  // Computes all tiles of the item, from the last to the first. Tiles that no row sees are waited for and
  // released.
  __device__ __forceinline__ void attend(const TileRange& range) {
    const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
#pragma unroll
    for (int i = 0; i < S::kDV / 2; ++i) o[i] = 0;
    int32_t tile = work.tiles - 1;
    for (; tile >= range.end; --tile) skip();
    if (tile >= range.first) {
      uint32_t p[S::kWeightRegisters];
      profiler.switch_to(Event::kWaitKeys);
      wait_for_tile(key_ring, use);
      // If rows see only the first half of the tile, compute only its logits. The same for P V, and for the
      // first tile of a window, was not faster and needs more code.
      if (kHasHalfTile && range.left <= S::kHalfKeys) {
        start<S::kHalfKeys>(p, tile, true);
      } else {
        start<S::kKeys>(p, tile, !range.is_whole(tile));
      }
      --tile;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        const int32_t last = part == 0 ? max(range.whole_end, range.first) : range.first;
#pragma unroll 1
        for (; tile >= last; --tile) step<true>(p, tile);
#pragma unroll 1
        for (; tile >= max(range.whole_first, range.first) && part == 0; --tile) step<false>(p, tile);
      }
      release(shared.query_ring(), query_use);
      profiler.switch_to(Event::kWaitValues);
      wait_for_tile(value_ring, use);
      profiler.switch_to(Event::kGemmPv);
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

  // Gathered tiles come from generic stores, which need a fence.
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

  // s = q k^T for the first 2 kN keys of a tile: the next one, or the one `ahead` tiles after it.
  template <int kN>
  __device__ __forceinline__ void multiply_keys(float (&s)[kN], int ahead) const {
    const uint64_t a = S::Queries::k_contiguous(shared.queries(query_use) + group * 64 * S::kWidth);
    const uint64_t b = S::Keys::k_contiguous(shared.keys(use + ahead));
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kDQ * S::kElement / 32; ++i)
      ptx::Wgmma<2 * kN>::template ss<kType, false>(s, a + S::Queries::k_contiguous_step(i),
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

  // Packs P. The tile's keys after the last key of s get 0.
  template <int kN>
  __device__ __forceinline__ static void pack_weights(uint32_t (&p)[S::kWeightRegisters], const float (&s)[kN]) {
#pragma unroll
    for (int i = 0; i < S::kWeightRegisters; ++i) {
      if (i >= kN * S::kElement / 4) {
        p[i] = 0;
      } else if constexpr (S::kFp8) {
        // Four keys of a row, in the order of transposed values.
        const int at = i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
        p[i] = pack_e4m3(s[at], s[at + 1], s[at + 4], s[at + 5]);
      } else {
        p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
      }
    }
  }

  template <bool kBorder, int kN>
  __device__ __forceinline__ void prepare(float (&s)[kN], int32_t tile) const {
    prepare_logits<kBorder, Variant, FirstKeys<S, 2 * kN>>(s, params, variant, work, work.first_key + tile * S::kKeys,
                                                           softmax.logits);
  }

  // Replaces logits by P. Returns true if O must be rescaled.
  template <int kN>
  __device__ __forceinline__ bool exponentiate(float (&s)[kN]) {
    if constexpr (!Variant::use_softmax) return false;
    const bool raised = softmax.update_max(s);
    softmax.exponentiate(s);
    return raised;
  }

  // Computes P of the first tile, of which rows see at most the first kKeys keys. The keys have arrived.
  template <int kKeys>
  __device__ __forceinline__ void start(uint32_t (&p)[S::kWeightRegisters], int32_t tile, bool border) {
    float s[kKeys / 2];
    profiler.switch_to(Event::kGemmQk);
    multiply_keys(s, 0);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
    release(shared.key_ring(), use);
    profiler.switch_to(Event::kSoftmax);
    // Variants have one copy of this code, because it is long.
    if (border || Variant::transforms_logits || Variant::masks_logits) prepare<true>(s, tile);
    exponentiate(s);
    pack_weights(p, s);
  }

  // Overlaps S of `tile` with P V of the tile before, whose P is in p. Waits for all of its products.
  template <bool kBorder>
  __device__ __forceinline__ void step(uint32_t (&p)[S::kWeightRegisters], int32_t tile) {
    const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
    float s[S::kKeys / 2];
    profiler.switch_to(Event::kWaitKeys);
    wait_for_tile(key_ring, use + 1);
    multiply_keys(s, 1);
    profiler.switch_to(Event::kWaitValues);
    wait_for_tile(value_ring, use);
    multiply_values(p);
    profiler.switch_to(Event::kGemmQk);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(s);
    release(key_ring, use + 1);
    profiler.switch_to(Event::kSoftmax);
    prepare<kBorder>(s, tile);
    const bool raised = exponentiate(s);
    profiler.switch_to(Event::kGemmPv);
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
