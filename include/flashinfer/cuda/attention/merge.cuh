// Putting together the parts of tiles whose keys were split. A block has one row of one key head at a time: kDV / 4
// threads walk along it, the others take turns with the parts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kPartThreads = 256, kPartBlocks = 8;  // of a multiprocessor at one time

// A row of a merge: where its parts are and where it goes.
struct MergeRow {
  int64_t first, step;  // of partial_lse: the first part, from one part to the next
  int32_t parts, batch, qo_idx, qo_head;
  int64_t token;

  // Which merge the row with a number belongs to.
  __device__ __forceinline__ static int32_t merge_of(const AttentionParams& params, uint32_t number) {
    return static_cast<int32_t>(number / params.slot_rows / params.num_kv_heads);
  }

  // False where the tile has no such row.
  __device__ __forceinline__ bool find(const AttentionParams& params, const MergeItem& item, uint32_t number) {
    const auto row = static_cast<int32_t>(number % params.slot_rows);
    const auto head = static_cast<int32_t>(number / params.slot_rows % params.num_kv_heads);
    if (item.row_start + row >= item.qo_len * static_cast<int32_t>(params.group.divisor)) return false;
    uint32_t qo, in_group;
    params.group.divmod(item.row_start + row, qo, in_group);
    qo_idx = static_cast<int32_t>(qo), batch = item.batch, parts = item.num_slots;
    qo_head = head * static_cast<int32_t>(params.group.divisor) + static_cast<int32_t>(in_group);
    token = int64_t{item.qo_start} + qo_idx;
    step = static_cast<int64_t>(params.num_kv_heads) * params.slot_rows;
    first = item.first_slot * step + static_cast<int64_t>(head) * params.slot_rows + row;
    return true;
  }
};

// Sums of four columns of some parts, weighted by 2^(lse - top). A part's weight is {lse, 1}, that of sums of some
// {top, total}.
template <bool kSoftmax>
struct PartSum {
  float4 sum{0, 0, 0, 0};
  float top = -math::inf, total = 0;

  // The first `count` of kN parts, whose exponentials wait for each other's tops alone.
  template <int kN>
  __device__ __forceinline__ void add(const float4 (&parts)[kN], const float2 (&weights)[kN], int count) {
    float now = top;
#pragma unroll
    for (int i = 0; i < kN; ++i) now = fmaxf(now, i < count ? weights[i].x : -math::inf);
    if (kSoftmax && now == -math::inf) return;  // no key was seen
    const float old = kSoftmax ? math::ptx_exp2(top - now) : 1;
    sum.x *= old, sum.y *= old, sum.z *= old, sum.w *= old, total *= old, top = now;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float weight = i >= count ? 0 : kSoftmax ? math::ptx_exp2(weights[i].x - now) : 1;
      if (weight == 0) continue;
      total += weight * weights[i].y;
      sum.x += weight * parts[i].x, sum.y += weight * parts[i].y;
      sum.z += weight * parts[i].z, sum.w += weight * parts[i].w;
    }
  }
};

// Adds a row's parts start, start + stride, ... to four columns' sums, kAtOnce of them under way together. They may
// have been written while this kernel ran: they are read from the L2 cache.
template <int kDV, int kAtOnce, bool kSoftmax>
__device__ __forceinline__ void add_parts(const AttentionParams& params, const MergeRow& row, int start, int stride,
                                          int column, PartSum<kSoftmax>& all) {
  for (; start < row.parts; start += kAtOnce * stride) {
    float4 parts[kAtOnce];
    float2 weights[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = row.first + min(start + i * stride, row.parts - 1) * row.step;
      weights[i] = {__ldcg(params.partial_lse + at), 1.0f};
      parts[i] = __ldcg(reinterpret_cast<const float4*>(params.partial_o + at * kDV + column * 4));
    }
    all.add(parts, weights, (row.parts - start + stride - 1) / stride);
  }
}

// Four columns of a row, of the sums of all its parts.
template <typename Variant, typename Types, typename P>
__device__ __forceinline__ void put_merged(const P& params, const MergeRow& row, int column,
                                           PartSum<Variant::use_softmax>& all) {
  float share = params.o_scale * add_sink<Variant>(params, row.qo_head, all.top, all.total);
  if constexpr (Variant::use_softmax) share *= all.total == 0 ? 0.0f : 1.0f / all.total;
  float values[4] = {all.sum.x * share, all.sum.y * share, all.sum.z * share, all.sum.w * share};
  if constexpr (Variant::transforms_output) {
    const Variant variant(params, static_cast<uint32_t>(row.batch), nullptr);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[i] = variant.OutputTransform(params, values[i], row.batch, row.qo_idx, row.qo_head);
  }
  auto* o = static_cast<typename Types::DTypeO*>(params.o) + row.token * params.o_row + row.qo_head * params.o_head;
  store_vec(o + column * 4, Vec<typename Types::DTypeO, 4>::from_floats(values));
  if (params.lse && column == 0)
    params.lse[row.token * params.num_qo_heads + row.qo_head] =
        !Variant::use_softmax || all.total == 0 ? -math::inf : all.top + math::ptx_log2(all.total);
}

// What the threads of a block have in common while they put rows together: kGroups groups of them, one of which has a
// row's columns.
template <typename Types, int kThreads>
struct MergeShape {
  static constexpr int kColumns = Types::HEAD_DIM_VO / 4, kGroups = kThreads / kColumns;
  static_assert(kColumns * kGroups == kThreads, "every thread has four columns of a row");
  float4 sums[kGroups][kColumns];
  float2 weights[kGroups];
};

// Rows `first` to first + rows - 1 of a merge, by the threads of a block; each reads kAtOnce parts together. Where
// there are more groups than rows, those of a row take turns with its parts.
template <int kAtOnce, typename Variant, typename Types, int kThreads, typename P>
__device__ __forceinline__ void merge_rows(const P& params, const MergeItem& item, uint32_t first, int rows,
                                           MergeShape<Types, kThreads>& shared) {
  constexpr int kColumns = MergeShape<Types, kThreads>::kColumns, kGroups = MergeShape<Types, kThreads>::kGroups;
  const int group = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const int turns = max(kGroups / rows, 1), turn = group % turns;
  for (int i = group / turns; i < max(rows, kGroups); i += kGroups) {
    MergeRow row;
    const bool found = i < rows && row.find(params, item, first + i);
    PartSum<Variant::use_softmax> all;
    if (found) add_parts<Types::HEAD_DIM_VO, kAtOnce>(params, row, turn, turns, column, all);
    if (turns > 1) {
      shared.sums[group][column] = all.sum;
      if (column == 0) shared.weights[group] = {all.top, all.total};
      __syncthreads();
      if (turn != 0) return;
      for (int other = group + 1; other < group + turns; ++other)
        all.add({shared.sums[other][column]}, {shared.weights[other]}, 1);
    }
    if (found) put_merged<Variant, Types>(params, row, column, all);
  }
}

// Blocks take rows in turns: a CUDA graph launches this kernel for the most rows that a plan may ever have, of which
// there are thousands, and a plan mostly has none.
template <typename Variant, typename Types, typename P>
__global__ void __launch_bounds__(kPartThreads) attention_merge_kernel(const __grid_constant__ P params) {
  __shared__ MergeShape<Types, kPartThreads> shared;
  wait_for_inputs();
  let_next_start();
  uint32_t number = blockIdx.x;
  // Before the number of merges is known: the two loads take the time of one.
  MergeItem item = params.merge(MergeRow::merge_of(params, number));
  const auto rows = static_cast<uint32_t>(params.num_merges()) * params.num_kv_heads * params.slot_rows;
  while (number < rows) {
    merge_rows<4, Variant>(params, item, number, 1, shared);
    number += gridDim.x;
    if (number >= rows) break;
    item = params.merge(MergeRow::merge_of(params, number));
    __syncthreads();  // shared memory is written again
  }
}

// The merges of a launch, where there can be any.
template <typename Variant, typename Types, typename P>
void launch_merges(const P& params, const Launch& where) {
  const int64_t merges = params.items ? params.max_merges : params.num_merges();
  const int64_t rows = merges * params.num_kv_heads * params.slot_rows;
  if (rows > INT32_MAX) throw std::runtime_error("attention: more than 2147483647 rows of partial results");
  const int64_t blocks = std::min(rows, int64_t{device_info(where.device).num_sms} * kPartBlocks);
  launch(attention_merge_kernel<Variant, Types, P>, dim3(static_cast<unsigned>(blocks)), dim3(kPartThreads), 0, where,
         params);
}

}  // namespace flashinfer::cuda
