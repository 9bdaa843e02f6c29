// The two consumer warpgroups. Each has 64 keys of a tile, and loops over the tiles of queries.
//
// S is computed with keys as rows, so that P and dS are in registers as the left operands of dV and dK. dS
// also goes to shared memory. dQ is a sum over the keys of both warpgroups, and each computes 64 x 64 of it.
// Meanwhile, S of the next tile is computed. Its exponentials overlap with the product dO V^T.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/prefill_backward.h>
#include <flashinfer/cuda/attention/backward/sm90/shape.cuh>
#include <flashinfer/cuda/attention/backward/sm90/work.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/stmatrix.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/ptx/wgmma.cuh>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda::sm90 {

// A warpgroup's use counters of the rings.
struct BackwardUses {
  int work = 0, key = 0, query = 0, sum = 0;
};

template <typename S>
struct BackwardTile {
  using T = typename S::T;
  static constexpr auto kType = ptx::kWgmmaType<T>;
  static constexpr int kLogits = S::kQueries / 2, kPairs = S::kQueries / 4, kOfKeys = S::kDim / 2;
  const PrefillBackwardParams& params;
  const BackwardShared<S>& shared;
  const BackwardWork& work;
  const int group;
  BackwardUses& uses;
  float dk[kOfKeys], dv[kOfKeys];

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kOfKeys; ++i) dk[i] = dv[i] = 0;
    if (work.steps == 0) return;
    const typename S::KeyRing keys = shared.key_ring();
    keys.wait_full(uses.key);
    const int32_t rows = work.kv_len - work.tile * S::kKeys;
    if (rows < S::kKeys) {
      clear<typename S::Keys>(shared.keys(), rows);
      clear<typename S::Keys>(shared.values(), rows);
      sync_consumers();
    }
    QueryTileCursor cursor(work);
    wait_queries(cursor.tile, uses.query);
    float s[kLogits], dq[32] = {};
    multiply_keys(s, uses.query);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
#pragma unroll 1
    for (int32_t step = 0; step < work.steps; ++step) this->step(s, dq, cursor, step);
    release(keys, uses.key++);
    store_dq(dq);
  }

 private:
  template <typename R>
  __device__ __forceinline__ static void release(const R& ring, int use) {
    if (threadIdx.x % 32 == 0) ring.release(use);
  }

  // Clear rows after the request's end: they may belong to the next request, or hold NaN.
  template <typename Rows>
  __device__ __forceinline__ static void clear(uint32_t tile, int32_t rows) {
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
#pragma unroll 1
      for (uint32_t at = rows * 128 + threadIdx.x * 16; at < Rows::kChunkBytes; at += S::kConsumers * 128 * 16)
        ptx::store_shared_16(tile + c * Rows::kChunkBytes + at, uint4{0, 0, 0, 0});
    }
  }
  __device__ __forceinline__ static void sync_consumers() {
    ptx::fence_proxy_async();
    ptx::named_barrier<128 * S::kConsumers>(1);
  }

  __device__ __forceinline__ void wait_queries(int32_t tile, int use) const {
    shared.query_ring().wait_full(use);
    const int32_t rows = work.qo_len - tile * S::kQueries;
    if (rows < S::kQueries) {
      clear<typename S::Queries>(shared.queries(use), rows);
      sync_consumers();
    }
  }
  __device__ __forceinline__ void wait_grads(int32_t tile, int use) const {
    shared.grad_ring().wait_full(use);
    const int32_t rows = work.qo_len - tile * S::kQueries;
    if (rows < S::kQueries) {
      clear<typename S::Queries>(shared.grads(use), rows);
      sync_consumers();
    }
  }

  // s = rows of a (keys or values) times rows of b (queries or dO)
  __device__ __forceinline__ void multiply(float (&s)[kLogits], uint32_t a_at, uint32_t b_at) const {
    const uint64_t a = S::Keys::k_contiguous(a_at + group * 64 * 128), b = S::Queries::k_contiguous(b_at);
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kDim / 16; ++i)
      ptx::Wgmma<S::kQueries>::template ss<kType, false>(s, a + S::Keys::k_contiguous_step(i),
                                                         b + S::Queries::k_contiguous_step(i), i > 0);
    ptx::warpgroup_commit();
  }
  __device__ __forceinline__ void multiply_keys(float (&s)[kLogits], int use) const {
    multiply(s, shared.keys(), shared.queries(use));
  }

  // sums += weights times rows of b
  __device__ __forceinline__ static void add(float (&sums)[kOfKeys], const uint32_t (&weights)[kPairs], uint32_t b_at) {
    const uint64_t b = S::Queries::n_contiguous(b_at);
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i)
      ptx::Wgmma<S::kDim>::template rs<kType, true>(sums, weights[4 * i], weights[4 * i + 1], weights[4 * i + 2],
                                                    weights[4 * i + 3], b + S::Queries::n_contiguous_step(i), true);
    ptx::warpgroup_commit();
  }

  // dq = the warpgroup's part of dQ. head_dim 64: 64 of 128 queries, all columns. head_dim 128: all 64
  // queries, 64 columns.
  __device__ __forceinline__ void multiply_logits(float (&dq)[32], int use) const {
    const int of_queries = S::kChunks == 1 ? group : 0, of_columns = S::kChunks == 1 ? 0 : group;
    const uint64_t a = S::Keys::n_contiguous(shared.logits(use) + of_queries * S::Keys::kChunkBytes);
    const uint64_t b = S::Keys::n_contiguous(shared.keys() + of_columns * S::Keys::kChunkBytes);
    ptx::warpgroup_fence();
#pragma unroll
    for (int i = 0; i < S::kKeys / 16; ++i)
      ptx::Wgmma<64>::template ss<kType, true, true>(dq, a + S::Keys::n_contiguous_step(i),
                                                     b + S::Keys::n_contiguous_step(i), i > 0);
    ptx::warpgroup_commit();
  }

  // P = 2^(S - lse), in place
  __device__ __forceinline__ void recompute_p(float (&s)[kLogits], uint32_t rows, int32_t query_tile) const {
    const float scale = params.sm_scale * math::log2e;
    const uint32_t lse_at = rows + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < kLogits / 4; ++n) {
      const uint2 two = ptx::load_shared_8(lse_at + n * 32);
      const float lse[2] = {__uint_as_float(two.x), __uint_as_float(two.y)};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * n + i] = math::ptx_exp2(s[4 * n + i] * scale - lse[i % 2]);
    }
    const int32_t key = work.tile * S::kKeys + group * 64, query = query_tile * S::kQueries;
    const bool causal = params.mask_mode == MaskMode::kCausal;
    const int32_t ahead = key - query - (work.kv_len - work.qo_len);  // of the first key and the first query
    if ((causal && ahead + 63 > 0) || key + 64 > work.kv_len) {
      const int32_t row =
          static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + static_cast<int32_t>(threadIdx.x) % 32 / 4;
      const int32_t column = static_cast<int32_t>(threadIdx.x) % 4 * 2;
      const int32_t most = causal ? column - row - ahead : S::kKeys;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t limit = key + row + 8 * half < work.kv_len ? most - 8 * half : -S::kKeys - S::kQueries;
#pragma unroll
        for (int i = 2 * half; i < kLogits; i += i % 2 == 0 ? 1 : 3) s[i] = -(i / 4 * 8 + i % 2) <= limit ? s[i] : 0.0f;
      }
    }
  }

  // Pack P and dS = P * (dP - delta) as operands. `weights` is P, `dp` is dP.
  __device__ __forceinline__ void differentiate(const float (&weights)[kLogits], const float (&dp)[kLogits],
                                                uint32_t (&p)[kPairs], uint32_t (&ds)[kPairs], uint32_t rows) const {
    const uint32_t delta_at = rows + S::kQueries * 4 + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < kLogits / 4; ++n) {
      const uint2 two = ptx::load_shared_8(delta_at + n * 32);
      const float delta[2] = {__uint_as_float(two.x), __uint_as_float(two.y)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * n + 2 * half;
        p[i / 2] = pack<T>(weights[i], weights[i + 1]);
        ds[i / 2] = pack<T>(weights[i] * (dp[i] - delta[0]), weights[i + 1] * (dp[i + 1] - delta[1]));
      }
    }
  }

  __device__ __forceinline__ void store_ds(const uint32_t (&ds)[kPairs], int use) const {
    const int row = group * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, right = threadIdx.x % 32 / 16;
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i)
      ptx::stmatrix_x4(shared.logits(use) + S::Keys::unit(row, 2 * i + right), ds[4 * i], ds[4 * i + 1], ds[4 * i + 2],
                       ds[4 * i + 3]);
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.logit_ring().arrive_full(use);
  }

  __device__ __forceinline__ void store_dq(const float (&dq)[32]) {
    const typename S::SumRing sums = shared.sum_ring();
    const uint32_t to = shared.sums(uses.sum) + group * (S::kSumBytes / 2) + threadIdx.x % 128 * 16;
    sums.wait_empty(uses.sum);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      ptx::store_shared_16(to + i * 2048, uint4{__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                                __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])});
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) sums.arrive_full(uses.sum);
    ++uses.sum;
  }

  // One tile of queries. S is ready at entry. At exit, s has S of the next tile, or of the last one again. dS
  // alternates between two buffers. A warp that overwrites one has seen the other one filled after its last
  // read.
  __device__ __forceinline__ void step(float (&s)[kLogits], float (&dq)[32], QueryTileCursor& cursor, int32_t number) {
    const int use = uses.query, next = number + 1 < work.steps ? use + 1 : use;
    float dp[kLogits];
    wait_grads(cursor.tile, use);
    multiply(dp, shared.values(), shared.grads(use));
    if (number > 0) store_dq(dq);
    recompute_p(s, shared.rows(use), cursor.tile);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(dp);
    uint32_t p[kPairs], ds[kPairs];
    differentiate(s, dp, p, ds, shared.rows(use));
    store_ds(ds, use);
    add(dv, p, shared.grads(use));
    cursor.advance();
    if (next != use) wait_queries(cursor.tile, next);
    multiply_keys(s, next);
    add(dk, ds, shared.queries(use));
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(p);
    ptx::warpgroup_hold(s);
    shared.logit_ring().wait_full(use);
    multiply_logits(dq, use);
    ptx::warpgroup_wait<1>();
    ptx::warpgroup_hold(p);
    ptx::warpgroup_hold(ds);
    release(shared.query_ring(), use);
    release(shared.grad_ring(), use);
    ptx::warpgroup_wait<0>();
    ptx::warpgroup_hold(s);
    ptx::warpgroup_hold(dq);
    ptx::warpgroup_hold(dk);
    ptx::warpgroup_hold(dv);
    ++uses.query;
  }
};

}  // namespace flashinfer::cuda::sm90
