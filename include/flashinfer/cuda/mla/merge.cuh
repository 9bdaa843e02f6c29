// Merge of the partial states of rows whose keys were split:
//   m = max_i m_i,   l = sum_i 2^(m_i - m) l_i,   O = (1 / l) sum_i 2^(m_i - m) O_i
// Few rows may have as many partial states each as the GPU has SMs: a CTA then merges a quarter of the
// columns of a row, and its warps divide the partial states. Many rows have few partial states each: a warp
// then merges half of a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/mla.h>
#include <flashinfer/attention/sinks.h>
#include <flashinfer/cuda/attention/merge.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kMlaMergeWarps = 8, kMlaMergeColumns = 128, kMlaQuarters = kMlaCkv / kMlaMergeColumns;
constexpr int kMlaMergeResident = 3;  // CTAs per multiprocessor at one time: 80 registers a thread

struct MlaMergeMemory {
  float4 o[kMlaMergeWarps][32];
  float2 ml[kMlaMergeWarps];
};

// Write four columns of a row. The lanes of column 0 also write lse.
template <typename T>
__device__ __forceinline__ void mla_write_merged(const MlaParams& params, const MergeRow& row, int column,
                                                 PartialState<true> state) {
  const float rescale = add_sink<MlaVariant>(params, row.qo_head, state.m, state.l);
  const float factor = state.l == 0 ? 0.0f : params.o_scale * rescale / state.l;
  const float values[4] = {state.o.x * factor, state.o.y * factor, state.o.z * factor, state.o.w * factor};
  store_vec(static_cast<T*>(params.o) + row.token * params.o_row + row.qo_head * params.o_head + column,
            Vec<T, 4>::from_floats(values));
  if (params.lse && column == 0)
    params.lse[int64_t{row.token} * params.num_qo_heads + row.qo_head] =
        state.l == 0 ? -math::inf : state.m + math::ptx_log2(state.l);
}

template <typename T>
__device__ __forceinline__ void mla_merge_row(const MlaParams& params, const MergeRow& row, int quarter,
                                              MlaMergeMemory& memory) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = quarter * kMlaMergeColumns + lane * 4;
  PartialState<true> state;
  add_states<kMlaCkv, 8>(params, row, warp, kMlaMergeWarps, column / 4, state);
  memory.o[warp][lane] = state.o;
  if (lane == 0) memory.ml[warp] = {state.m, state.l};
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int i = 1; i < kMlaMergeWarps; ++i) state.add(memory.o[i][lane], memory.ml[i].x, memory.ml[i].y);
  mla_write_merged<T>(params, row, column, state);
}

template <typename T>
__global__ void __launch_bounds__(32 * kMlaMergeWarps, kMlaMergeResident)
    mla_merge_kernel(const __grid_constant__ MlaParams params) {
  __shared__ MlaMergeMemory memory;
  // The plan may be read before wait_for_inputs(): the attention kernel launches this one after its own wait
  // for the plan. The partial states may not, because the attention kernel writes them.
  uint32_t number = blockIdx.x;
  MergeItem item = params.merge(MergeRow::merge_of(params, number / kMlaQuarters));
  const auto rows = static_cast<uint32_t>(params.num_merges()) * params.slot_rows;
  wait_for_inputs();
  launch_dependents();
  while (number < rows * kMlaQuarters) {
    MergeRow row;
    if (row.find(params, item, number / kMlaQuarters))
      mla_merge_row<T>(params, row, static_cast<int>(number % kMlaQuarters), memory);
    number += gridDim.x;
    if (number >= rows * kMlaQuarters) break;
    item = params.merge(MergeRow::merge_of(params, number / kMlaQuarters));
    __syncthreads();  // the next row overwrites smem
  }
}

// Merge half a row, four partial states at a time. A lane has four columns in each quarter of the half.
template <typename T>
__device__ __forceinline__ void mla_merge_half(const MlaParams& params, const MergeRow& row, int half) {
  constexpr int kAtOnce = 4, kGroups = 2;
  const int column = half * (kMlaCkv / 2) + static_cast<int>(threadIdx.x) % 32 * 4;
  PartialState<true> states[kGroups];
  for (int start = 0; start < row.splits; start += kAtOnce) {
    float4 states_o[kAtOnce][kGroups];
    float2 states_ml[kAtOnce];  // m and l
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i >= row.splits) continue;
      const int64_t at = row.first + int64_t{start + i} * row.step;
      states_ml[i] = *reinterpret_cast<const float2*>(params.partial_ml + at);
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        states_o[i][group] = *reinterpret_cast<const float4*>(params.partial_o + at * kMlaCkv + column + group * 128);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i >= row.splits) continue;
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        states[group].add(states_o[i][group], states_ml[i].x, states_ml[i].y);
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; ++group) mla_write_merged<T>(params, row, column + group * 128, states[group]);
}

template <typename T>
__global__ void __launch_bounds__(32 * kMlaMergeWarps, kMlaMergeResident)
    mla_merge_halves_kernel(const __grid_constant__ MlaParams params) {
  uint32_t number = blockIdx.x * kMlaMergeWarps + threadIdx.x / 32;
  const auto max_halves = static_cast<uint32_t>(params.max_merges) * params.slot_rows * 2;
  MergeItem item = params.merge(
      MergeRow::merge_of(params, number < max_halves ? number / 2 : 0));  // before the wait, as in mla_merge_kernel
  const auto halves = static_cast<uint32_t>(params.num_merges()) * params.slot_rows * 2;
  wait_for_inputs();
  launch_dependents();
  while (number < halves) {
    MergeRow row;
    if (row.find(params, item, number / 2)) mla_merge_half<T>(params, row, static_cast<int>(number % 2));
    number += gridDim.x * kMlaMergeWarps;
    if (number < halves) item = params.merge(MergeRow::merge_of(params, number / 2));
  }
}

template <typename T>
void launch_mla_merges(const MlaParams& params, const Launch& where) {
  const int64_t rows = int64_t{params.max_merges} * params.slot_rows, sms = device_info(where.device).num_sms;
  constexpr int kBlocks = 4;  // per multiprocessor at one time
  const bool few = rows <= 2 * sms;
  const int64_t blocks =
      few ? rows * kMlaQuarters : std::min((2 * rows + kMlaMergeWarps - 1) / kMlaMergeWarps, kBlocks * sms);
  launch(few ? mla_merge_kernel<T> : mla_merge_halves_kernel<T>, dim3(static_cast<unsigned>(blocks)),
         dim3(32 * kMlaMergeWarps), where, params);
}

}  // namespace flashinfer::cuda
