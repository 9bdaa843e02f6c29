// Decode on Hopper: the portable kernel's tiles, queries, softmax and outputs around two things of its own, boxes of
// TMA (boxes.cuh) and merges in the kernel (tickets.cuh).
//
// Of bytes alone there is little to gain. One request of 32768 keys, 8 heads of 128 and 16 bits, is 134 MB: 36.3 us as
// a bare stream on an H200, 39.7 by the portable kernel, and 16 of 4096 keys, 268 MB, 65.2 and 69.2: some 3.5 us in
// either, whatever the length. Those are the launch of the merges behind the end of the last block (1.5 to 2.5 us,
// which tickets spare), the lookups before the first byte (about 1.5 us, which begin with the kernel and not behind its
// barriers), and blocks of unequal lengths (cuts at 16 keys rather than 64: 1.5 % of the former). Predicted: 37.3
// and 67.1 us.
//
// What is read before the kernel in front has ended: parameters, maps among them, and nothing else. Plans, page tables
// and caches may all be what that kernel writes.
//
// Pages of other sizes than multiples of 16 take the portable kernel's gather, with tickets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include <flashinfer/attention/config.h>
#include <flashinfer/cuda/host/tensor_map.h>
#include <flashinfer/cuda/attention/sm80/launch.cuh>
#include <flashinfer/cuda/attention/sm90/boxes.cuh>
#include <flashinfer/cuda/attention/tickets.cuh>
#include <flashinfer/cuda/profiler.cuh>

namespace flashinfer::cuda::sm90 {

template <typename Types>
using DecodeTile =
    AttentionTile<1, 1, Types::kBytesOfKey >= 1024 ? 2 : 4, Types::kBytesOfKey <= 256 ? 32 : 16, 3, 2, true>;
template <typename Types>
using DecodeShape = AttentionShape<Types, DecodeTile<Types>>;

// All tiles of a warp.
template <typename S, typename Tile, typename Track>
__device__ __forceinline__ void attend_boxes(const BoxLoader<S>& keys, Tile& tile, int count, Track& profiler) {
  Stages stages(count);
  uint32_t parity = 0;
  int32_t page = keys.page_of(keys.start + count * keys.kStride);
#pragma unroll 1
  for (int32_t tile_start = keys.start; tile_start < keys.kv_end; tile_start += keys.kStride) {
    const uint32_t stage = keys.ring + stages.current * S::kStageBytes;
    const int32_t next = tile_start + count * keys.kStride;
    profiler.begin(Event::kWaitKeys);
    ptx::mbarrier_wait(keys.barriers + 8 * stages.current, parity);
    profiler.end(Event::kWaitKeys);
    keys.clear_others(stage + S::kKBytes, tile_start);
    profiler.begin(Event::kAttend);
    tile.attend(stage, 0, tile_start);
    profiler.end(Event::kAttend);
    keys.load(stages.current, next, page);
    page = keys.page_of(next + keys.kStride);
    stages.advance();
    if (stages.current == 0) parity ^= 1;
  }
}

// One query token for each request. The first tile starts at a multiple of 16 keys: keys of it before the item's are
// hidden as keys on the left of a window are.
template <typename S>
__device__ __forceinline__ void hide_before(WarpRows<S>& warp, const WorkItem& item) {
  warp.mask.window_left = min(warp.mask.window_left, item.kv_len - 1 - item.kv_start);
  warp.seen_start = max(warp.seen_start, item.kv_start), warp.shared_start = max(warp.shared_start, item.kv_start);
}

template <typename Variant, typename S, typename P>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    decode_kernel(const __grid_constant__ P params, const __grid_constant__ KeyMaps maps, const int stages,
                  const int heads_together) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t raw[];
  const uint32_t start = (ptx::shared_address(raw) + 1023) & ~1023u;
  uint8_t* const shared = raw + (start - ptx::shared_address(raw));
  BoxLoader<S>::init(maps, start, stages);
  wait_for_inputs();
  let_next_start();
  Profiler<P::kProfiler> profiler(params);
  WorkItem item;
  int32_t head;
  if (!find_work<Variant, S>(params, heads_together, item, head)) return;
  profiler.begin(Event::kItem);
  const BoxLoader<S> keys(params.kv, maps, item, head, start, stages);
  keys.load_first(stages);
  profiler.begin(Event::kLoadQuery);
  const Variant variant(params, static_cast<uint32_t>(item.batch), nullptr);
  const int32_t merge = merge_of_slot(params, item.slot);
  load_queries<Variant, S>(params, variant, item, head, shared, nullptr, query_sign(variant));
  __syncthreads();
  profiler.end(Event::kLoadQuery);

  WarpRows<S> warp(params, variant, item, head);
  hide_before(warp, item);
  WarpTile<Variant, S, P> tile(params, variant, warp, nullptr, start);
  attend_boxes<S>(keys, tile, stages, profiler);
  profiler.begin(Event::kWriteOutput);
  write_outputs<Variant, S>(params, variant, item, warp, tile.o, tile.softmax, shared);
  merge_if_last<Variant, typename S::Types, S::kThreads>(params, merge, head);
  profiler.end(Event::kWriteOutput);
  profiler.end(Event::kItem);
  profiler.finish();
#endif
}

template <typename S>
CUtensorMap map_of_boxes(const AttentionParams& params, const void* data, int head_dim, int64_t page, int64_t row,
                         int64_t head) {
  using T = typename S::DTypeKV;
  constexpr int kSize = sizeof(T);
  const KvCache& kv = params.kv;
  const bool paged = kv.is_paged();
  const uint64_t rows = paged ? kv.page_size.divisor : kv.num_pages, pages = paged ? kv.num_pages : 1;
  // A cache of nothing has no memory, and a map wants some.
  const MapShape<4> shape{kv.num_pages > 0 ? data : params.q,
                          {static_cast<uint64_t>(head_dim), rows, static_cast<uint64_t>(params.num_kv_heads), pages},
                          {1, row, head, paged ? page : row},
                          {static_cast<uint32_t>((head_dim * kSize % 128 == 0 ? 128 : 64) / kSize), kBoxKeys, 1, 1}};
  return head_dim * kSize % 128 == 0 ? tensor_map<128>(map_type<T>(), kSize, shape)
                                     : tensor_map<64>(map_type<T>(), kSize, shape);
}

// Boxes have 16 keys of one page.
inline bool takes_boxes(const KvCache& kv) { return !kv.is_paged() || kv.page_size.divisor % kBoxKeys == 0; }

template <typename Variant, typename S, typename P>
void launch_boxes(const P& params, const Launch& where) {
  const Residency& how = residency<decode_kernel<Variant, S, P>, S>(where.device);
  const KvCache& kv = params.kv;
  const KeyMaps maps{map_of_boxes<S>(params, kv.k, S::kDQ, kv.k_page, kv.k_row, kv.k_head),
                     map_of_boxes<S>(params, kv.v, S::kDV, kv.v_page, kv.v_row, kv.v_head)};
  const unsigned blocks = blocks_of(params, how);
  launch(decode_kernel<Variant, S, P>, dim3(blocks), dim3(S::kThreads), S::shared_bytes(how.stages), where,
         with_tracks(params, blocks, S::kThreads), maps, how.stages, heads_together<S>(params));
  if (params.tickets == nullptr) launch_merges<Variant, typename S::Types>(params, where);
}

// A cut costs no launch, so that pieces need not be long, and warps need not have the same number of tiles.
template <typename Variant, typename Types, typename P>
WorkLimits decode_limits(int device) {
  using S = DecodeShape<Types>;
  return {S::kRows, residency<decode_kernel<Variant, S, P>, S>(device).blocks, 2 * S::kKeys * S::kKeyWarps, S::kKeys};
}

template <typename Variant, typename Types, typename P>
void decode(const P& params, const Launch& where) {
  static_assert(!Types::kRope, "keys are used as they are: rotation needs backend fa2");
  if (takes_boxes(params.kv)) {
    launch_boxes<Variant, DecodeShape<Types>>(params, where);
  } else {
    launch_attention<Variant, AttentionShape<Types, SmallTile<Types>>, P, true>(params, where);
  }
}

}  // namespace flashinfer::cuda::sm90
