// The portable attention kernel (FlashAttention-2, arXiv 2307.08691). A CTA computes a tile of rows of one
// request and KV head with a range of its keys. For each tile of keys:
//   S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + P V
#pragma once

#include <cstdint>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention/fragments.cuh>
#include <flashinfer/cuda/attention/output.cuh>
#include <flashinfer/cuda/attention/rotation.cuh>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/attention/sm80/load.cuh>
#include <flashinfer/cuda/attention/sm80/queries.cuh>
#include <flashinfer/cuda/attention/softmax.cuh>
#include <flashinfer/cuda/attention/tickets.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/profiler.cuh>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/pipeline.cuh>

namespace flashinfer::cuda {

// A warp's queries and outputs, in registers.
template <typename Variant, typename S, typename P>
struct WarpTile {
  using T = typename S::DTypeQ;
  // The product of rotated queries and keys has a factor 32/31 (see rotation.cuh). The scale of softmax
  // removes it.
  static constexpr bool kFactorInSoftmax = S::kRope && Variant::use_softmax && !Variant::transforms_logits;
  const P& params;
  const Variant& variant;
  const WarpRows<S>& warp;
  const RopeFrequency* frequencies;
  SmemOperandA<S::kQRowBytes> queries;
  OnlineSoftmax<S> softmax;
  Outputs<S> o;
  uint32_t q[S::kQueryInRegisters ? S::kM : 1][S::kQueryInRegisters ? S::kSteps : 1][4];

  __device__ __forceinline__ WarpTile(const P& p, const Variant& v, const WarpRows<S>& w,
                                      const RopeFrequency* frequencies_, uint32_t shared)
      : params(p),
        variant(v),
        warp(w),
        frequencies(frequencies_),
        queries(shared, static_cast<int>(threadIdx.x) / 32 % S::kRowWarps * 16 * S::kM),
        softmax(kFactorInSoftmax ? softmax_scale(v) * kFirstFactor : softmax_scale(v)) {
    o.clear();
    if constexpr (S::kQueryInRegisters) {
#pragma unroll
      for (int m = 0; m < S::kM; ++m) {
#pragma unroll
        for (int step = 0; step < S::kSteps; ++step) queries.load(q[m][step], m, step);
      }
    }
  }

  // Rotate this thread's share of a tile of keys. h and g are the two 16-bit parts of a rotated key
  // (rotation.cuh). Write g to `rotated`, and h there too unless kRotatesInPlace.
  __device__ __forceinline__ void rotate(const KeyLoader<S>& keys, uint32_t stage, uint32_t rotated,
                                         int32_t tile_start) const {
    rotate_tile<Variant, S>(params, variant, frequencies, stage, first_keys(stage, rotated), second_keys(rotated),
                            keys.thread, tile_start);
  }

  // Update O, m and l with one tile of keys and values in smem.
  __device__ __forceinline__ void attend(uint32_t stage, uint32_t rotated, int32_t tile_start) {
    if (tile_start >= warp.seen_end || tile_start + S::kKeys <= warp.seen_start) return;
    Products<S> s;
    s.clear();
    if constexpr (S::kRope) {
      multiply_keys(s, first_keys(stage, rotated), 0);
      multiply_keys(s, second_keys(rotated), S::kQPartBytes);
      if constexpr (!kFactorInSoftmax) s.scale(kFirstFactor);
    } else {
      multiply_keys(s, stage, 0);
    }
    if constexpr (Variant::transforms_logits) transform_logits<Variant, S>(s, params, variant, warp, tile_start);
    mask_tile<Variant, S>(s, params, variant, warp, tile_start);
    if constexpr (Variant::use_softmax) softmax.exponentiate(s, o);
    multiply_values(s, stage + S::kKBytes);
  }

 private:
  __device__ __forceinline__ static uint32_t first_keys(uint32_t stage, uint32_t rotated) {
    return S::kRotatesInPlace ? stage : rotated;
  }
  __device__ __forceinline__ static uint32_t second_keys(uint32_t rotated) {
    return rotated + (S::kRotatesInPlace ? 0 : S::kOperandBytes);
  }

  // s += Q K^T. `offset` selects part h or g of rotated queries (rotation.cuh).
  __device__ __forceinline__ void multiply_keys(Products<S>& s, uint32_t keys, int offset) const {
    const KeyOperand<S> rows(keys, 0);
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t a[S::kM][4], b[2][2];
#pragma unroll
      for (int m = 0; m < S::kM; ++m) {
        if constexpr (S::kQueryInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = q[m][step][i];
        } else {
          queries.load(a[m], m, step, offset);
        }
      }
#pragma unroll
      for (int pair = 0; pair < S::kNKeys / 2; ++pair) {
        rows.load(b, pair, step);
        if constexpr (Variant::transforms_key && !S::kRope) transform_keys<Variant, S>(b, params, variant);
        s.template add<T>(a, b, pair);
      }
    }
  }

  __device__ __forceinline__ void multiply_values(const Products<S>& s, uint32_t values) {
    const ValueOperand<S> rows(values, 0);
#pragma unroll
    for (int key_step = 0; key_step < S::kNKeys / 2; ++key_step) {
      uint32_t weights[S::kM][4];
#pragma unroll
      for (int m = 0; m < S::kM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weights[m][i] = pack<T>(s[m][2 * key_step + i / 2][i % 2 * 2], s[m][2 * key_step + i / 2][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int pair = 0; pair < S::kNOut / 2; ++pair) {
        uint32_t b[2][2];
        rows.load(b, key_step, S::kFp8 ? pair : 2 * pair);
        o.template add<T>(weights, b, pair);
      }
    }
  }
};

// Prologue: start the copies of the first `stages` - 1 tiles.
template <typename S>
__device__ __forceinline__ void prologue(const KeyLoader<S>& keys, int stages) {
  keys.find_first_rows(stages);
  keys.sync();
  for (int i = 0; i < stages - 1; ++i) {
    const int32_t tile_start = keys.start + i * keys.kStride;
    if (tile_start < keys.kv_end) keys.load(i, tile_start);
    ptx::cp_async_commit();
  }
}

// Compute one tile and rotate one. With kRotatesAhead, rotate the next tile: of the two warps of a scheduler,
// one rotates while the other uses the tensor cores. Otherwise rotate the tile first and then compute it.
template <typename S, typename Tile>
__device__ __forceinline__ void attend_and_rotate(const KeyLoader<S>& keys, Tile& tile, bool active,
                                                  const Stages& stages, int number, int32_t tile_start) {
  const uint32_t stage = keys.ring + stages.current * S::kStageBytes;
  if constexpr (S::kRotatesAhead) {
    const uint32_t next_stage = keys.ring + stages.next() * S::kStageBytes;
    const uint32_t rotated = keys.rotated + number % 2 * S::kRotatedTileBytes;
    const uint32_t next_rotated = keys.rotated + (number + 1) % 2 * S::kRotatedTileBytes;
    const int32_t next_start = tile_start + keys.kStride;
    const bool attends_first = threadIdx.x / 128 % 2 == 0;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      if ((phase == 0) == attends_first) {
        if (active) tile.attend(stage, rotated, tile_start);
      } else if (next_start < keys.kv_end) {
        tile.rotate(keys, next_stage, next_rotated, next_start);
      }
    }
  } else {
    tile.rotate(keys, stage, keys.rotated, tile_start);
    keys.sync();
    if (active) tile.attend(stage, keys.rotated, tile_start);
  }
}

// Mainloop of the warps that share tiles of keys. Compute one tile while the next ones are copied.
template <typename S, typename Tile, typename Track>
__device__ __forceinline__ void mainloop(const KeyLoader<S>& keys, Tile& tile, bool active, int count,
                                         Track& profiler) {
  Stages stages(count);
  if constexpr (S::kRotatesAhead) {
    wait_for_copies(count - 2);
    keys.sync();
    if (keys.start < keys.kv_end) tile.rotate(keys, keys.ring, keys.rotated, keys.start);
  }
  int number = 0;
#pragma unroll 1
  for (int32_t tile_start = keys.start; tile_start < keys.kv_end; tile_start += keys.kStride, ++number) {
    profiler.switch_to(Event::kWaitKeys);
    wait_for_copies(stages.count - S::kMinStages);
    keys.sync();
    const int32_t next = tile_start + (stages.count - 1) * keys.kStride;
    profiler.switch_to(Event::kLoadKv);
    if (next < keys.kv_end) keys.load(stages.previous(), next);
    ptx::cp_async_commit();
    const int32_t key = next + keys.kStride + keys.thread;
    const bool looks_up = keys.thread < S::kKeys;
    const int32_t page = looks_up ? keys.page_of(key) : 0;
    profiler.switch_to(Event::kAttend);
    if constexpr (S::kRope) {
      attend_and_rotate(keys, tile, active, stages, number, tile_start);
    } else if (active) {
      tile.attend(keys.ring + stages.current * S::kStageBytes, 0, tile_start);
    }
    if (looks_up) keys.table[stages.current * S::kKeys + keys.thread] = keys.row_of(key, page);
    stages.advance();
  }
}

// Find the item and KV head of this CTA, and restrict the item's keys to those that its rows may see. CTAs
// follow this order, from outermost to innermost: sections of `heads_per_section` heads, items, heads of the
// section, parts of O.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ bool find_work(const P& params, int heads_per_section, WorkItem& item, int32_t& head) {
  const int32_t all = params.items ? params.max_items : params.num_items(), used = params.num_items();
  const int32_t number = static_cast<int32_t>(blockIdx.x) / S::kVParts;
  const int32_t item_and_head = number % (all * heads_per_section);
  const int32_t index = item_and_head / heads_per_section;
  head = number / (all * heads_per_section) * heads_per_section + item_and_head % heads_per_section;
  // Without a plan the last tile comes first: with a causal mask it sees the most keys.
  item = params.item(params.items ? index : used - 1 - index);
  if (index >= used) return false;  // after the load above: the latencies of the two loads overlap
  Mask mask(params, item);
  if constexpr (has_window<Variant>) narrow(mask, Variant(params, static_cast<uint32_t>(item.batch), nullptr));
  const int32_t last_row = min(item.row_start + S::kRows, item.qo_len * static_cast<int32_t>(params.group.divisor)) - 1;
  item.kv_start = max(item.kv_start, mask.begin(static_cast<int32_t>(params.group.div(item.row_start))));
  item.kv_end = max(min(item.kv_end, mask.end(static_cast<int32_t>(params.group.div(last_row)))), item.kv_start);
  return true;
}

// kTickets: if the keys of a tile are split, its last CTA merges the partial states (tickets.cuh).
template <typename Variant, typename S, typename P, bool kTickets = false>
__global__ void __launch_bounds__(S::kThreads, S::kCtasPerSm)
    attention_kernel(const __grid_constant__ P params, const int max_stages, const int heads_per_section) {
  static_assert(!kTickets || S::kVParts == 1, "a ticket counts the CTAs of one item and KV head");
  extern __shared__ __align__(128) uint8_t shared[];
  const int stages = S::kMaxStages == S::kMinStages ? S::kMinStages : max_stages;
  wait_for_inputs();
  launch_dependents();  // the next kernel still waits for the end of all CTAs, but is resident by then
  Profiler<P::kProfiler> profiler(params);
  WorkItem item;
  int32_t head;
  if (!find_work<Variant, S>(params, heads_per_section, item, head)) return;
  profiler.begin(Event::kItem);
  const KeyLoader<S> keys(params.kv, item, head, shared, stages);
  prologue<S>(keys, stages);
  profiler.begin(Event::kLoadQuery);
  const Variant variant(params, static_cast<uint32_t>(item.batch), nullptr);
  const int32_t merge = kTickets ? merge_of_slot(params, item.slot) : -1;
  auto* frequencies = reinterpret_cast<RopeFrequency*>(shared + S::kQBytes);
  if constexpr (S::kRope) {
    find_frequencies<S>(params, frequencies);
    __syncthreads();
  }
  load_queries<Variant, S>(params, variant, item, head, shared, frequencies, query_sign(variant));
  __syncthreads();

  const WarpRows<S> warp(params, variant, item, head);
  WarpTile<Variant, S, P> tile(params, variant, warp, frequencies, ptx::shared_address(shared));
  mainloop<S>(keys, tile, warp.active(), stages, profiler);
  profiler.switch_to(Event::kWriteOutput);
  write_outputs<Variant, S>(params, variant, item, warp, tile.o, tile.softmax, shared);
  if constexpr (kTickets) merge_if_last<Variant, typename S::Types, S::kThreads>(params, merge, head);
  profiler.end(Event::kWriteOutput);
  profiler.end(Event::kItem);
  profiler.finish();
}

}  // namespace flashinfer::cuda
