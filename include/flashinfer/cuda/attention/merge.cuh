// Merge of the partial states of tiles whose keys were split (Flash-Decoding, Dao et al., 2023):
//   m = max_i m_i,   l = sum_i 2^(m_i - m) l_i,   O = (1 / l) sum_i 2^(m_i - m) O_i
// A CTA merges one row of one KV head at a time. kDV / 4 threads hold the columns of one state. A CTA loads
// kStates states at once, as many as fit into kMergeThreads threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

// Tiles with at most this many keys are not split. Decode of one request and of four, 32/8 heads, bfloat16,
// on an H100: 400 keys take 9.6 us whole or split, 512 keys 10.4 us whole and 9.1 us split, 1,024 keys 16.5
// and 9.3.
constexpr int kUnsplitKeys = 448;

constexpr int kMergeThreads = 256, kMergeCtas = 8;  // launched per multiprocessor

// A row of a merge: its partial states and its destination. A slot is the place of a split in the workspace.
// It has slot_rows partial states of each KV head.
struct MergeRow {
  int64_t first;  // index of the first state in partial_ml
  int32_t step;   // from one state to the next
  int32_t splits, batch, qo_idx, qo_head, token;

  // Return the index of the merge item that contains row `number`.
  __device__ __forceinline__ static int32_t merge_of(const AttentionParams& params, uint32_t number) {
    return static_cast<int32_t>(number / params.slot_rows / params.num_kv_heads);
  }

  // Find the row. Return false if the tile has no such row.
  __device__ __forceinline__ bool find(const AttentionParams& params, const MergeItem& item, uint32_t number) {
    const auto row = static_cast<int32_t>(number % params.slot_rows);
    const auto head = static_cast<int32_t>(number / params.slot_rows % params.num_kv_heads);
    if (item.row_start + row >= item.qo_len * static_cast<int32_t>(params.group.divisor)) return false;
    uint32_t qo, in_group;
    params.group.divmod(item.row_start + row, qo, in_group);
    qo_idx = static_cast<int32_t>(qo), batch = item.batch, splits = item.num_slots;
    qo_head = head * static_cast<int32_t>(params.group.divisor) + static_cast<int32_t>(in_group);
    token = item.qo_start + qo_idx;
    step = params.num_kv_heads * params.slot_rows;
    first = int64_t{item.first_slot} * step + int64_t{head} * params.slot_rows + row;
    return true;
  }
};

// The merged state of some splits in four columns: row maximum m, row sum l, and unnormalised O, relative to
// m.
template <bool kSoftmax>
struct PartialState {
  float4 o{0, 0, 0, 0};
  float m = -math::inf, l = 0;

  __device__ __forceinline__ void add(float4 other_o, float other_m, float other_l) {
    float rescale = 1, weight = 1;
    if constexpr (kSoftmax) {
      if (other_l == 0) return;  // the split saw no key
      const float now = fmaxf(m, other_m);
      rescale = math::ptx_exp2(m - now), weight = math::ptx_exp2(other_m - now);
      l = l * rescale + other_l * weight, m = now;
    }
    o.x = o.x * rescale + other_o.x * weight, o.y = o.y * rescale + other_o.y * weight;
    o.z = o.z * rescale + other_o.z * weight, o.w = o.w * rescale + other_o.w * weight;
  }
};

// Add a row's states start, start + stride, ... to four columns. Loads of kAtOnce states are in flight. A
// kernel may have written states while this one ran, so they are read from the L2 cache. No state is read
// twice, because reads bound the time of merges.
template <int kDV, int kAtOnce, bool kSoftmax>
__device__ __forceinline__ void add_states(const AttentionParams& params, const MergeRow& row, int start, int stride,
                                           int column, PartialState<kSoftmax>& merged) {
  const int64_t step = int64_t{stride} * row.step;  // to this thread's next state
  const PartialSoftmax* from_ml = params.partial_ml + row.first + int64_t{start} * row.step;
  const float* from_o = params.partial_o + (row.first + int64_t{start} * row.step) * kDV + column * 4;
  for (; start < row.splits; start += kAtOnce * stride) {
    float4 states_o[kAtOnce];
    float2 states_ml[kAtOnce];  // m and l
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i * stride >= row.splits) continue;
      states_ml[i] = __ldcg(reinterpret_cast<const float2*>(from_ml));
      states_o[i] = __ldcg(reinterpret_cast<const float4*>(from_o));
      from_ml += step, from_o += step * kDV;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (start + i * stride < row.splits) merged.add(states_o[i], states_ml[i].x, states_ml[i].y);
  }
}

// Write four columns of a row from its merged state.
template <typename Variant, typename Types, typename P>
__device__ __forceinline__ void write_merged(const P& params, const MergeRow& row, int column,
                                             PartialState<Variant::use_softmax>& merged) {
  float normaliser = params.o_scale * add_sink<Variant>(params, row.qo_head, merged.m, merged.l);
  if constexpr (Variant::use_softmax && !Variant::normalises_output)
    normaliser *= merged.l == 0 ? 0.0f : 1.0f / merged.l;
  float values[4] = {merged.o.x * normaliser, merged.o.y * normaliser, merged.o.z * normaliser,
                     merged.o.w * normaliser};
  if constexpr (Variant::transforms_output) {
    const Variant variant(params, static_cast<uint32_t>(row.batch), nullptr);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[i] = transform_output(params, variant, values[i], row.batch, row.qo_idx, row.qo_head, merged.m, merged.l);
  }
  auto* o = static_cast<typename Types::DTypeO*>(params.o) + row.token * params.o_row + row.qo_head * params.o_head;
  store_vec(o + column * 4, Vec<typename Types::DTypeO, 4>::from_floats(values));
  if (params.lse && column == 0)
    params.lse[int64_t{row.token} * params.num_qo_heads + row.qo_head] =
        !Variant::use_softmax || merged.l == 0 ? -math::inf : merged.m + math::ptx_log2(merged.l);
}

// Shared memory of a CTA's merge: kStates states, each merged from every kStates-th split.
template <typename Types>
struct MergeMemory {
  static constexpr int kDV = Types::HEAD_DIM_VO, kColumns = kDV / 4, kStates = kMergeThreads / kColumns;
  static constexpr int kThreads = kColumns * kStates;  // each has four columns of a row
  static_assert(kColumns <= kMergeThreads && kDV % 4 == 0, "the threads of a state are in one CTA");
  float4 o[kStates][kColumns];
  float2 ml[kStates];
};

template <typename Variant, typename Types, typename P>
__device__ __forceinline__ void merge_row(const P& params, const MergeRow& row, MergeMemory<Types>& shared) {
  constexpr int kColumns = MergeMemory<Types>::kColumns, kStates = MergeMemory<Types>::kStates;
  const int state = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  PartialState<Variant::use_softmax> merged;
  add_states<Types::HEAD_DIM_VO, 4>(params, row, state, kStates, column, merged);
  shared.o[state][column] = merged.o;
  if (column == 0) shared.ml[state] = {merged.m, merged.l};
  __syncthreads();
  if (state != 0) return;
#pragma unroll
  for (int i = 1; i < kStates; ++i) merged.add(shared.o[i][column], shared.ml[i].x, shared.ml[i].y);
  write_merged<Variant, Types>(params, row, column, merged);
}

// CTAs take rows in rotation. A CUDA graph launches this kernel for the largest number of rows of any plan,
// thousands, but most plans have no rows to merge.
template <typename Variant, typename Types, typename P>
__global__ void __launch_bounds__(kMergeThreads) attention_merge_kernel(const __grid_constant__ P params) {
  __shared__ MergeMemory<Types> shared;
  launch_dependents();  // before the wait, so that the next kernel is launched while attention still runs
  wait_for_inputs();
  uint32_t number = blockIdx.x;
  // Loaded before the number of merges is known: the latencies of the two loads overlap.
  MergeItem item = params.merge(MergeRow::merge_of(params, number));
  const auto rows = static_cast<uint32_t>(params.num_merges()) * params.num_kv_heads * params.slot_rows;
  while (number < rows) {
    MergeRow row;
    if (row.find(params, item, number)) merge_row<Variant, Types>(params, row, shared);
    number += gridDim.x;
    if (number >= rows) break;
    item = params.merge(MergeRow::merge_of(params, number));
    __syncthreads();  // shared memory is overwritten next
  }
}

// Launch the merge kernel, unless the call cannot have merges.
template <typename Variant, typename Types, typename P>
void launch_merges(const P& params, const Launch& where) {
  const int64_t merges = params.items ? params.max_merges : params.num_merges();
  const int64_t rows = merges * params.num_kv_heads * params.slot_rows;
  if (rows > INT32_MAX) throw std::runtime_error("attention: more than 2147483647 rows of partial results");
  const int64_t ctas = std::min(rows, int64_t{device_info(where.device).num_sms} * kMergeCtas);
  launch(attention_merge_kernel<Variant, Types, P>, dim3(static_cast<unsigned>(ctas)),
         dim3(MergeMemory<Types>::kThreads), where, params);
}

}  // namespace flashinfer::cuda
