// Putting together the parts of rows whose keys were split. One request may be
// in as many parts as there are multiprocessors, so a block takes a quarter of
// a row's columns, and its warps take turns with the parts.
#pragma once

#include <cstdint>

#include <flashinfer/attention/math.h>
#include <flashinfer/attention/mla.h>
#include <flashinfer/cuda/attention/merge.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kMlaMergeWarps = 8, kMlaMergeColumns = 128, kMlaQuarters = kMlaCkv / kMlaMergeColumns;

struct MlaMergeMemory {
  float4 sums[kMlaMergeWarps][32];
  float2 weights[kMlaMergeWarps];
};

template <typename T>
__device__ __forceinline__ void mla_merge_row(const MlaParams& params, const MergeRow& row, int quarter,
                                              MlaMergeMemory& memory) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int column = quarter * kMlaMergeColumns + lane * 4;
  PartSum<true> all;
  add_parts<kMlaCkv, 8>(params, row, warp, kMlaMergeWarps, column / 4, all);
  memory.sums[warp][lane] = all.sum;
  if (lane == 0) memory.weights[warp] = {all.top, all.total};
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int i = 1; i < kMlaMergeWarps; ++i) all.add(memory.sums[i][lane], memory.weights[i].x, memory.weights[i].y);
  const float share = all.total == 0 ? 0.0f : params.o_scale / all.total;
  const float values[4] = {all.sum.x * share, all.sum.y * share, all.sum.z * share, all.sum.w * share};
  store_vec(static_cast<T*>(params.o) + row.token * params.o_row + row.qo_head * params.o_head + column,
            Vec<T, 4>::from_floats(values));
  if (params.lse && quarter == 0 && lane == 0)
    params.lse[row.token * params.num_qo_heads + row.qo_head] =
        all.total == 0 ? -math::inf : all.top + math::ptx_log2(all.total);
}

template <typename T>
__global__ void __launch_bounds__(32 * kMlaMergeWarps) mla_merge_kernel(const __grid_constant__ MlaParams params) {
  __shared__ MlaMergeMemory memory;
  // The kernel before wrote the parts. What a plan says was there before it: its blocks let this one start behind their
  // own wait for that.
  uint32_t number = blockIdx.x;
  MergeItem item = params.merge(MergeRow::merge_of(params, number / kMlaQuarters));
  const auto rows = static_cast<uint32_t>(params.num_merges()) * params.slot_rows;
  wait_for_inputs();
  let_next_start();
  while (number < rows * kMlaQuarters) {
    MergeRow row;
    if (row.find(params, item, number / kMlaQuarters))
      mla_merge_row<T>(params, row, static_cast<int>(number % kMlaQuarters), memory);
    number += gridDim.x;
    if (number >= rows * kMlaQuarters) break;
    item = params.merge(MergeRow::merge_of(params, number / kMlaQuarters));
    __syncthreads();  // shared memory is written again
  }
}

template <typename T>
struct MlaMergeTypes {
  using DTypeO = T;
  static constexpr int HEAD_DIM_VO = kMlaCkv;
};

// Few rows have many parts each; where there are more, attention's merges take a row at a time.
template <typename T>
void launch_mla_merges(const MlaParams& params, const Launch& where) {
  const int64_t rows = int64_t{params.max_merges} * params.slot_rows, sms = device_info(where.device).num_sms;
  if (rows > 2 * sms) return launch_merges<MlaVariant, MlaMergeTypes<T>>(params, where);
  launch(mla_merge_kernel<T>, dim3(static_cast<unsigned>(rows * kMlaQuarters)), dim3(32 * kMlaMergeWarps), 0, where,
         params);
}

}  // namespace flashinfer::cuda
