#pragma once
#include <flashinfer/attention/variants.h>
#include <flashinfer/attention/schedule.h>
#include <flashinfer/cuda/attention/sm80/launch.cuh>
#include "lab_load.cuh"
namespace flashinfer {
struct Params : AttentionParams {
  float* maybe_alibi_slopes;
  double* maybe_numbers;
  float* maybe_head_scales;
  float* maybe_sinks;
  float sm_scale, logits_soft_cap;
  uint32_t* times;
};
using Variant = DefaultAttention<false, false, false, false>;
namespace cuda {
enum : int { kTick = 1, kFast = 2, kTables = 4, kEvict = 8, kGuess = 16, kUnsafe = 32, kTimes = 64, kNoMerge = 128 };
template <typename Types_, typename Tile_, int kFlags>
struct LabShape : AttentionShape<Types_, Tile_> { static constexpr int kF = kFlags; };
__device__ __forceinline__ uint32_t now() { uint32_t t; asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(t)); return t; }
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
template <typename S>
__device__ __forceinline__ void stamp(const Params& p, int which) {
  if constexpr ((S::kF & kTimes) != 0) { if (threadIdx.x == 0) p.times[blockIdx.x * 8 + which] = now(); }
}
template <typename S>
__device__ __forceinline__ void lab_first(const LabLoader<S>& keys, int stages) {
  keys.find_first(stages);
  keys.sync();
  for (int i = 0; i < stages - 1; ++i) {
    const int32_t tile_start = keys.start + i * keys.kStride;
    if (tile_start < keys.kv_end) keys.load(i, tile_start);
    ptx::cp_async_commit();
  }
}
template <typename S, typename Tile>
__device__ __forceinline__ void lab_all(const LabLoader<S>& keys, Tile& tile, bool active, int count, const Params& p) {
  Stages stages(count);
  bool first = true;
#pragma unroll 1
  for (int32_t tile_start = keys.start; tile_start < keys.kv_end; tile_start += keys.kStride) {
    wait_for_copies(stages.count - S::kMinStages);
    keys.sync();
    if constexpr ((S::kF & kTimes) != 0) { if (first) stamp<S>(p, 3), first = false; }
    const int32_t next = tile_start + (stages.count - 1) * keys.kStride;
    if (next < keys.kv_end) keys.load(stages.before(), next);
    ptx::cp_async_commit();
    const int32_t key = next + keys.kStride + keys.lane;
    const bool finds = keys.lane < S::kKeys;
    const int32_t page = finds ? keys.page_of(key) : 0;
    if (active) tile.attend(keys.ring + stages.current * S::kStageBytes, 0, tile_start);
    if (finds) keys.table[stages.current * S::kKeys + keys.lane] = keys.row_of(key, page);
    stages.advance();
  }
}
template <int kDV, int kAtOnce, bool kSoftmax>
__device__ __forceinline__ void lab_parts(const AttentionParams& params, const MergeRow& row, int start, int stride,
                                          int column, PartSum<kSoftmax>& all) {
  for (; start < row.parts; start += kAtOnce * stride) {
    float4 parts[kAtOnce];
    float lse[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = row.first + min(start + i * stride, row.parts - 1) * row.step;
      lse[i] = __ldcg(params.partial_lse + at);
      parts[i] = __ldcg(reinterpret_cast<const float4*>(params.partial_o + at * kDV + column * 4));
    }
    float top = all.top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i * stride >= row.parts) lse[i] = -math::inf;
      top = fmaxf(top, lse[i]);
    }
    if (top == -math::inf) continue;
    const float old = math::ptx_exp2(all.top - top);
    all.sum.x *= old, all.sum.y *= old, all.sum.z *= old, all.sum.w *= old, all.total *= old, all.top = top;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float w = math::ptx_exp2(lse[i] - top);
      all.total += w;
      all.sum.x += w * parts[i].x, all.sum.y += w * parts[i].y, all.sum.z += w * parts[i].z, all.sum.w += w * parts[i].w;
    }
  }
}
template <typename Types, int kThreads>
__device__ __forceinline__ void lab_merge(const Params& params, const MergeItem& item, int32_t number, int32_t head, uint8_t* shared) {
  constexpr int kColumns = Types::HEAD_DIM_VO / 4, kAtOnce = 16, kGroups = kThreads / kColumns;
  auto* sums = reinterpret_cast<float4*>(shared);
  auto* weights = reinterpret_cast<float2*>(sums + kThreads);
  const int32_t rows = min(item.qo_len * static_cast<int32_t>(params.group.divisor) - item.row_start, params.slot_rows);
  const uint32_t first = (static_cast<uint32_t>(number) * params.num_kv_heads + head) * params.slot_rows;
  const int group = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const int turns = rows >= kGroups ? 1 : kGroups / rows, at_once = kGroups / turns;
  for (int r = 0; r < rows; r += at_once) {
    const int which = r + group / turns, turn = group % turns;
    MergeRow row;
    const bool there = group < at_once * turns && which < rows && row.find(params, item, first + which);
    PartSum<true> all;
    if (there) lab_parts<Types::HEAD_DIM_VO, kAtOnce>(params, row, turn, turns, column, all);
    if (turns > 1) {
      __syncthreads();
      sums[threadIdx.x] = all.sum;
      if (column == 0) weights[group] = {all.top, all.total};
      __syncthreads();
      if (turn != 0) continue;
      for (int i = 1; i < turns && there; ++i) all.add(sums[threadIdx.x + i * kColumns], weights[group + i].x, weights[group + i].y);
    }
    if (there) put_merged<Variant, Types>(params, row, column, all);
  }
}
template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    lab_kernel(const __grid_constant__ Params params, const int most_stages, const int heads_together) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int stages = S::kMaxStages == S::kMinStages ? S::kMinStages : most_stages;
  const int32_t lane = threadIdx.x % 32;
  stamp<S>(params, 0);
  if constexpr ((S::kF & kTables) != 0) {
    const int index = static_cast<int>(blockIdx.x) / heads_together;
    if (threadIdx.x == 0) prefetch_l2(params.counts), prefetch_l2(params.items + index), prefetch_l2(params.kv.indptr + lane), prefetch_l2(params.kv_lens), prefetch_l2(params.merges);
  }
  if constexpr ((S::kF & kUnsafe) != 0) {
    WorkItem item;
    int32_t head;
    if (find_work<Variant, S>(params, heads_together, item, head)) {
      const LabLoader<S> keys(params.kv, item, head, shared, stages, params.kv.indptr[item.batch]);
      constexpr int kEach = (S::kMaxStages * S::kKeys + 31) / 32;
#pragma unroll
      for (int n = 0; n < kEach; ++n) {
        const int i = lane + n * 32;
        const int32_t t = keys.start + i / S::kKeys * keys.kStride + i % S::kKeys;
        if (i < S::kMaxStages * S::kKeys && t < keys.kv_end) {
          const KeyRow row = keys.row_of(t, keys.page_of(t));
          asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row.k), "n"(S::kKRow));
          asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row.v), "n"(S::kVRow));
        }
      }
    }
  }
  wait_for_inputs();
  let_next_start();
  stamp<S>(params, 1);
  WorkItem item;
  int32_t head;
  int32_t guess = 0;
  if constexpr ((S::kF & kGuess) != 0) guess = params.kv.indptr[min(lane, static_cast<int32_t>(params.num_tokens))];
  if (!find_work<Variant, S>(params, heads_together, item, head)) return;
  int32_t first;
  if constexpr ((S::kF & kGuess) != 0) {
    first = __shfl_sync(kAllLanes, guess, item.batch % 32);
    if (item.batch >= 32) first = params.kv.indptr[item.batch];
  } else {
    first = params.kv.indptr[item.batch];
  }
  stamp<S>(params, 2);
  const LabLoader<S> keys(params.kv, item, head, shared, stages, first);
  lab_first<S>(keys, stages);
  const Variant variant(params, static_cast<uint32_t>(item.batch), nullptr);
  const int32_t merge = (S::kF & kTick) != 0 ? merge_of_slot(params, item.slot) : -1;
  load_queries<Variant, S>(params, variant, item, head, shared, nullptr, query_sign(variant));
  __syncthreads();
  const WarpRows<S> warp(params, variant, item, head);
  WarpTile<Variant, S, Params> tile(params, variant, warp, nullptr, ptx::shared_address(shared));
  lab_all<S>(keys, tile, warp.active(), stages, params);
  stamp<S>(params, 4);
  write_outputs<Variant, S>(params, variant, item, warp, tile.o, tile.softmax, shared);
  stamp<S>(params, 5);
  if constexpr ((S::kF & kTick) != 0 && (S::kF & kNoMerge) == 0) {
    if constexpr ((S::kF & kFast) == 0) {
      merge_if_last<Variant, typename S::Types, S::kThreads>(params, merge, head);
    } else if (merge >= 0) {
      const MergeItem which = params.merges[merge];
      const auto last = static_cast<uint32_t>(which.num_slots) - 1;
      __syncthreads();
      bool is_last = false;
      if (threadIdx.x == 0)
        is_last = ptx::atomic_inc_acq_rel(params.tickets + int64_t{merge} * params.num_kv_heads + head, last) == last;
      if (__syncthreads_or(is_last)) lab_merge<typename S::Types, S::kThreads>(params, which, merge, head, shared);
    }
  }
  stamp<S>(params, 6);
  if constexpr ((S::kF & kTimes) != 0) {
    if (threadIdx.x == 0) { uint32_t sm; asm volatile("mov.u32 %0, %smid;" : "=r"(sm)); params.times[blockIdx.x * 8 + 7] = sm; }
  }
}
}  // namespace cuda
struct LabEntry {
  const char* name;
  int fp8;
  WorkLimits (*limits)(int);
  void (*run)(const Params&, const Launch&);
};
namespace cuda {
template <typename S, int kStep, int kMin>
WorkLimits lab_limits(int device) {
  return {S::kRows, residency<lab_kernel<S>, S>(device).blocks, kMin, kStep};
}
template <typename S>
void lab_run(const Params& params, const Launch& where) {
  const Residency& how = residency<lab_kernel<S>, S>(where.device);
  const unsigned blocks = blocks_of(params, how);
  launch(lab_kernel<S>, dim3(blocks), dim3(S::kThreads), S::shared_bytes(how.stages), where, params, how.stages, heads_together<S>(params));
  if ((S::kF & (kTick | kNoMerge)) == 0) launch_merges<Variant, typename S::Types>(params, where);
}
template <typename KV, int kWarps, int kKeys, int kStages, int kBlocks, int kFlags, int kStep, int kMin>
LabEntry entry(const char* name) {
  using Types = AttentionTypes<bfloat16_t, KV, bfloat16_t, 128, 128, PosEncodingMode::kNone>;
  using S = LabShape<Types, AttentionTile<1, 1, kWarps, kKeys, kStages, kBlocks>, kFlags>;
  return {name, sizeof(KV) == 1, lab_limits<S, kStep, kMin>, lab_run<S>};
}
}  // namespace cuda
}  // namespace flashinfer
