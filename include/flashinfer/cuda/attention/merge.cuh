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

// Keys of a tile up to which nothing is cut. A merge takes 10 us on an H100 (one request of 400 keys, beside 11.5 us of
// attention), in which a block reads about as many keys.
constexpr int kWholeKeys = 1024;

constexpr int kPartThreads = 256, kPartBlocks = 8;  // of a multiprocessor, launched

// A row of a merge: where its parts are and where it goes.
struct MergeRow {
  int64_t first;  // of partial_ml: the first part
  int32_t step;   // from one part to the next
  int32_t parts, batch, qo_idx, qo_head, token;

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
    token = item.qo_start + qo_idx;
    step = params.num_kv_heads * params.slot_rows;
    first = int64_t{item.first_slot} * step + int64_t{head} * params.slot_rows + row;
    return true;
  }
};

// Sums of four columns of some parts, relative to their largest reference: m, l and four numbers of O.
template <bool kSoftmax>
struct PartSum {
  float4 sum{0, 0, 0, 0};
  float top = -math::inf, total = 0;

  __device__ __forceinline__ void add(float4 part, float part_top, float part_total) {
    float old = 1, weight = 1;
    if constexpr (kSoftmax) {
      if (part_total == 0) return;  // no key was seen
      const float now = fmaxf(top, part_top);
      old = math::ptx_exp2(top - now), weight = math::ptx_exp2(part_top - now);
      total = total * old + part_total * weight, top = now;
    }
    sum.x = sum.x * old + part.x * weight, sum.y = sum.y * old + part.y * weight;
    sum.z = sum.z * old + part.z * weight, sum.w = sum.w * old + part.w * weight;
  }
};

// Adds a row's parts start, start + stride, ... to four columns' sums, kAtOnce of them under way together. They may
// have been written while this kernel ran: they are read from the L2 cache, and no part twice, since that is what
// bounds merges.
template <int kDV, int kAtOnce, bool kSoftmax>
__device__ __forceinline__ void add_parts(const AttentionParams& params, const MergeRow& row, int start, int stride,
                                          int column, PartSum<kSoftmax>& all) {
  const int64_t step = int64_t{stride} * row.step;  // to the part after the next `stride`
  const PartialSoftmax* from_ml = params.partial_ml + row.first + int64_t{start} * row.step;
  const float* from_o = params.partial_o + (row.first + int64_t{start} * row.step) * kDV + column * 4;
  for (; start < row.parts; start += kAtOnce * stride) {
    float4 parts[kAtOnce];
    float2 softmax[kAtOnce];  // m and l
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i * stride >= row.parts) continue;
      softmax[i] = __ldcg(reinterpret_cast<const float2*>(from_ml));
      parts[i] = __ldcg(reinterpret_cast<const float4*>(from_o));
      from_ml += step, from_o += step * kDV;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (start + i * stride < row.parts) all.add(parts[i], softmax[i].x, softmax[i].y);
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
    params.lse[int64_t{row.token} * params.num_qo_heads + row.qo_head] =
        !Variant::use_softmax || all.total == 0 ? -math::inf : all.top + math::ptx_log2(all.total);
}

// What threads have in common while they put a row together.
template <typename Types>
struct MergeShape {
  static constexpr int kDV = Types::HEAD_DIM_VO, kColumns = kDV / 4, kTurns = kPartThreads / kColumns;
  static_assert(kColumns * kTurns == kPartThreads, "every thread has four columns of a row");
  float4 sums[kTurns][kColumns];
  float2 weights[kTurns];
};

template <typename Variant, typename Types, typename P>
__device__ __forceinline__ void merge_row(const P& params, const MergeRow& row, MergeShape<Types>& shared) {
  constexpr int kColumns = MergeShape<Types>::kColumns, kTurns = MergeShape<Types>::kTurns;
  const int turn = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  PartSum<Variant::use_softmax> all;
  add_parts<Types::HEAD_DIM_VO, 4>(params, row, turn, kTurns, column, all);
  shared.sums[turn][column] = all.sum;
  if (column == 0) shared.weights[turn] = {all.top, all.total};
  __syncthreads();
  if (turn != 0) return;
#pragma unroll
  for (int i = 1; i < kTurns; ++i) all.add(shared.sums[i][column], shared.weights[i].x, shared.weights[i].y);
  put_merged<Variant, Types>(params, row, column, all);
}

// Blocks take rows in turns: a CUDA graph launches this kernel for the most rows that a plan may ever have, of which
// there are thousands, and a plan mostly has none.
template <typename Variant, typename Types, typename P>
__global__ void __launch_bounds__(kPartThreads) attention_merge_kernel(const __grid_constant__ P params) {
  __shared__ MergeShape<Types> shared;
  wait_for_inputs();
  let_next_start();
  uint32_t number = blockIdx.x;
  // Before the number of merges is known: the two loads take the time of one.
  MergeItem item = params.merge(MergeRow::merge_of(params, number));
  const auto rows = static_cast<uint32_t>(params.num_merges()) * params.num_kv_heads * params.slot_rows;
  while (number < rows) {
    MergeRow row;
    if (row.find(params, item, number)) merge_row<Variant, Types>(params, row, shared);
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
  launch(attention_merge_kernel<Variant, Types, P>, dim3(static_cast<unsigned>(blocks)), dim3(kPartThreads), where,
         params);
}

}  // namespace flashinfer::cuda
