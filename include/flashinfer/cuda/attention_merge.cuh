// Putting together the parts of tiles whose keys were split. A block has one row of one key head: kDV / 4 threads walk
// along it, the others take turns with the parts.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/cuda/attention_shape.cuh>
#include <flashinfer/cuda/launch.cuh>

namespace flashinfer::cuda {

constexpr int kPartThreads = 128;

// A row of a merge: where its parts are and where it goes.
struct MergeRow {
  int64_t first, step;  // of partial_lse: the first part, from one part to the next
  int32_t parts, batch, qo_idx, qo_head;
  int64_t token;

  // False where there is nothing to do.
  __device__ __forceinline__ bool find(const AttentionParams& params, int32_t block) {
    const int32_t row = block % params.slot_rows, rest = block / params.slot_rows;
    const int32_t head = rest % params.num_kv_heads, index = rest / params.num_kv_heads;
    if (index >= params.num_merges()) return false;
    const MergeItem item = params.merge(index);
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

template <bool kSoftmax>
__device__ __forceinline__ float highest_part(const AttentionParams& params, const MergeRow& row) {
  float top = -math::inf;
  if constexpr (kSoftmax) {
    for (int i = threadIdx.x % 32; i < row.parts; i += 32)
      top = fmaxf(top, params.partial_lse[row.first + i * row.step]);
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lane));
  }
  return top;
}

template <typename Variant, typename Types, typename P>
__global__ void __launch_bounds__(kPartThreads) attention_merge_kernel(const __grid_constant__ P params) {
  constexpr int kDV = Types::HEAD_DIM_VO, kColumns = kDV / 4, kTurns = kPartThreads / kColumns;
  static_assert(kColumns * kTurns == kPartThreads, "every thread has a column");
  __shared__ float4 sums[kTurns][kColumns];
  __shared__ float weights[kTurns];
  wait_for_inputs();
  MergeRow row;
  if (!row.find(params, static_cast<int32_t>(blockIdx.x))) return;
  const int turn = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const float top = highest_part<Variant::use_softmax>(params, row);
  float4 sum{0, 0, 0, 0};
  float total = 0;
#pragma unroll 4
  for (int i = turn; i < row.parts; i += kTurns) {
    const int64_t at = row.first + i * row.step;
    const float lse = params.partial_lse[at];
    const auto part = *reinterpret_cast<const float4*>(params.partial_o + at * kDV + column * 4);
    const float weight = !Variant::use_softmax ? 1.0f : lse == -math::inf ? 0.0f : math::ptx_exp2(lse - top);
    if (weight == 0) continue;
    total += weight;
    sum.x += weight * part.x, sum.y += weight * part.y, sum.z += weight * part.z, sum.w += weight * part.w;
  }
  sums[turn][column] = sum;
  if (column == 0) weights[turn] = total;
  __syncthreads();
  let_next_start();
  if (turn != 0) return;
#pragma unroll
  for (int i = 1; i < kTurns; ++i) {
    const float4 part = sums[i][column];
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w, total += weights[i];
  }
  const float share = Variant::use_softmax ? (total == 0 ? 0.0f : 1.0f / total) * params.o_scale : params.o_scale;
  float values[4] = {sum.x * share, sum.y * share, sum.z * share, sum.w * share};
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
        !Variant::use_softmax || total == 0 ? -math::inf : top + math::ptx_log2(total);
}

}  // namespace flashinfer::cuda
