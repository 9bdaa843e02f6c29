// Mainloop of a consumer warpgroup: 64 rows and all tiles of keys of an item (FlashAttention-3, arXiv
// 2407.08608, section 3.2). O += P V of one tile runs on the tensor cores during the softmax of the next
// tile:
//   S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + P V
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
  static constexpr ptx::WgmmaType kPType = kType == ptx::WgmmaType::kE5M2 ? ptx::WgmmaType::kE4M3E5M2 : kType;
  // Variants need too many registers for the second instance of first_step().
  static constexpr bool kHasHalfTile = !Variant::transforms_logits && !Variant::masks_logits;
  const P& params;
  const Shared<S>& shared;
  const Work& work;
  const Variant& variant;
  const int warpgroup;
  // Running numbers of tiles in their rings: the stage of a tile is its use modulo the number of stages.
  const int query_use;
  int use;  // of the next tile of values; in step(), the keys are one tile ahead
  Softmax<S::kFp8> softmax;
  float o[S::kDV / 2];
  Profiler<P::kProfiler>& profiler;

  // Compute all tiles of the item, from the last to the first. Wait for and release tiles that no row sees.
  __device__ __forceinline__ void attend(const TileRange& range) {
    const typename S::KeyRing key_ring = shared.key_ring(), value_ring = shared.value_ring();
#pragma unroll
    for (int i = 0; i < S::kDV / 2; ++i) o[i] = 0;
    int32_t tile = work.tiles - 1;
    for (; tile >= range.end; --tile) skip();
    if (tile >= range.first) {
      uint32_t p[S::kPRegisters];
      profiler.switch_to(Event::kWaitKeys);
      wait_for_tile(key_ring, use);
      // If rows see only the first half of the tile, compute only half of S. Halving P V, or S of the tile at
      // the left edge of a window, was not faster.
      if (kHasHalfTile && range.left <= S::kHalfKeys) {
        first_step<S::kHalfKeys>(p, tile, true);
      } else {
        first_step<S::kKeys>(p, tile, !range.is_whole(tile));
      }
      --tile;
      // Three runs, from the last key to the first: masked, whole, masked. The loop over `pass` gives both
      // masked runs one copy of the code.
#pragma unroll 1
      for (int pass = 0; pass < 2; ++pass) {
        const int32_t last = pass == 0 ? max(range.whole_end, range.first) : range.first;
#pragma unroll 1
        for (; tile >= last; --tile) step<true>(p, tile);
#pragma unroll 1
        for (; tile >= max(range.whole_first, range.first) && pass == 0; --tile) step<false>(p, tile);
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

  // S = Q K^T for the first 2 kN keys of tile number `use` + `ahead` in the ring.
  template <int kN>
  __device__ __forceinline__ void multiply_keys(float (&s)[kN], int ahead) const {
    const uint64_t a = S::Queries::k_contiguous(shared.queries(query_use) + warpgroup * 64 * S::kChunkRowBytes);
    const uint64_t b = S::Keys::k_contiguous(shared.keys(use + ahead));
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kDQ * S::kElementBytes / 32; ++i)
      ptx::Wgmma<2 * kN>::template ss<kType, false>(s, a + S::Queries::k_contiguous_step(i),
                                                    b + S::Keys::k_contiguous_step(i), i > 0);
    ptx::warpgroup_commit();
  }

  // O += P V
  __device__ __forceinline__ void multiply_values(const uint32_t (&p)[S::kPRegisters]) {
    using V = typename S::Transposed;
    const uint64_t b = S::kFp8 ? V::k_contiguous(shared.values(use)) : S::Keys::n_contiguous(shared.values(use));
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kPRegisters / 4; ++i)
      ptx::Wgmma<S::kDV>::template rs<kPType, !S::kFp8>(
          o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
          b + (S::kFp8 ? V::k_contiguous_step(i) : S::Keys::n_contiguous_step(i)), true);
    ptx::warpgroup_commit();
  }

  // Pack P. It is 0 for the keys of the tile that s does not have.
  template <int kN>
  __device__ __forceinline__ static void pack_p(uint32_t (&p)[S::kPRegisters], const float (&s)[kN]) {
#pragma unroll
    for (int i = 0; i < S::kPRegisters; ++i) {
      if (i >= kN * S::kElementBytes / 4) {
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

  template <bool kMasked, int kN>
  __device__ __forceinline__ void prepare(float (&s)[kN], int32_t tile) const {
    prepare_logits<kMasked, Variant, FirstKeys<S, 2 * kN>>(s, params, variant, work, work.first_key + tile * S::kKeys,
                                                           softmax.logits);
  }

  // Replace S by P. Return true if O must be rescaled.
  template <int kN>
  __device__ __forceinline__ bool exponentiate(float (&s)[kN]) {
    if constexpr (!Variant::use_softmax) return false;
    const bool raised = softmax.update_max(s);
    softmax.exponentiate(s);
    return raised;
  }

  // Compute P of the first tile from its first kKeys keys, which have arrived. Rows see no later key.
  template <int kKeys>
  __device__ __forceinline__ void first_step(uint32_t (&p)[S::kPRegisters], int32_t tile, bool masked) {
    float s[kKeys / 2];
    profiler.switch_to(Event::kGemmQk);
    multiply_keys(s, 0);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
    release(shared.key_ring(), use);
    profiler.switch_to(Event::kSoftmax);
    // With a variant the code is long, so both cases share one copy.
    if (masked || Variant::transforms_logits || Variant::masks_logits) prepare<true>(s, tile);
    exponentiate(s);
    pack_p(p, s);
  }

  // Overlap S of `tile` with P V of the previous tile, whose P is in p. No wgmma is in flight afterwards.
  template <bool kMasked>
  __device__ __forceinline__ void step(uint32_t (&p)[S::kPRegisters], int32_t tile) {
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
    prepare<kMasked>(s, tile);
    const bool raised = exponentiate(s);
    profiler.switch_to(Event::kGemmPv);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(o);
    ptx::warpgroup_hold(p);
    release(value_ring, use);
    if (raised) softmax.rescale(o);
    pack_p(p, s);
    ++use;
  }
};

}  // namespace flashinfer::cuda::sm90
