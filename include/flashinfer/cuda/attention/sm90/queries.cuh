// Changes of queries in shared memory before their use: a variant's transform, and a sign that makes the
// scale of softmax positive.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/attention/sm90/shape.cuh>
#include <flashinfer/cuda/attention/softmax.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda::sm90 {

// Clear the last rows of a tile if whole tokens do not fill it, because no copy writes them. Stale contents
// could trigger the lazy rescaling that a warp decides together, and change the last bits of results from run
// to run. Runs in all threads.
template <typename S, typename P>
__device__ __forceinline__ void clear_unused_queries(const P& params, const Shared<S>& shared) {
  const int first = params.tile_rows * S::kChunkRowBytes, bytes = S::Queries::kChunkBytes;
  if (first == bytes) return;
  for (int chunk = 0; chunk < S::kQueryStages * S::kChunksQ; ++chunk) {
    for (int at = first + threadIdx.x * 16; at < bytes; at += S::kThreads * 16)
      *reinterpret_cast<uint4*>(shared.bytes + S::kQueriesAt + chunk * bytes + at) = uint4{0, 0, 0, 0};
  }
  ptx::fence_proxy_async();
}

// Rewrite a warpgroup's 64 rows if a transform or a sign is needed.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void prepare_queries(const P& params, const Variant& variant, const Shared<S>& shared,
                                                int group, int query_use) {
  using T = typename S::DTypeQ;
  constexpr int kUnits = 64 * S::kChunkRowBytes / 16;  // of a chunk
  const float sign = query_sign(variant);
  if (!Variant::transforms_query && sign > 0) return;
  uint8_t* rows = shared.bytes + (shared.queries(query_use) - shared.start) + group * 64 * S::kChunkRowBytes;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < S::kChunksQ * kUnits; i += 128) {
    // Elements are transformed independently, in any order.
    auto* unit = reinterpret_cast<uint32_t*>(rows + i / kUnits * S::Queries::kChunkBytes + i % kUnits * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (S::kFp8) {
        static_assert(!Variant::transforms_query, "queries of 8 bits are used as they are");
        unit[j] ^= 0x80808080;
        continue;
      } else {
        float low, high;
        unpack<T>(unit[j], low, high);
        if constexpr (Variant::transforms_query)
          low = static_cast<float>(variant.QueryTransform(params, low)),
          high = static_cast<float>(variant.QueryTransform(params, high));
        unit[j] = pack<T>(low * sign, high * sign);
      }
    }
  }
  ptx::fence_proxy_async();
  ptx::named_barrier<128>(1 + group);
}

}  // namespace flashinfer::cuda::sm90
