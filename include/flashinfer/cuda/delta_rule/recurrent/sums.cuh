// Partial sums of the recurrent gradients: their workspace, and the reduction over the columns of a CTA.
#pragma once

#include <cstdint>

#include <flashinfer/cuda/delta_rule/columns.cuh>

namespace flashinfer::cuda {

// Workspace of partial sums in float32. Arrays with `slices` have one part for each slice of value columns.
struct DeltaBackwardSums {
  int64_t slices, tokens, keys, values, heads_of_states;
  bool has_gk;
  float *r, *dv;            // [B, T, HV, V]
  float *dq, *dk, *gk;      // [slices, B, T, HV, K]
  float *dbeta, *g;         // [slices, B, T, HV]
  float *last_g, *last_gk;  // [slices, N, HV] and [slices, N, HV, K]: <dS, S> after the last token

  FLASHINFER_HD DeltaBackwardSums(const DeltaRuleInputs& in, int columns, void* workspace)
      : slices((in.value_dim + columns - 1) / columns),
        tokens(in.batch_size * in.num_tokens * in.num_value_heads),
        keys(tokens * in.key_dim),
        values(tokens * in.value_dim),
        heads_of_states(in.num_sequences * in.num_value_heads),
        has_gk(in.gk != nullptr) {
    float* next = static_cast<float*>(workspace);
    const auto allocate = [&](int64_t count) {
      float* const here = next;
      next += count;
      return here;
    };
    r = allocate(values);
    dv = allocate(values);
    dq = allocate(slices * keys);
    dk = allocate(slices * keys);
    dbeta = allocate(slices * tokens), g = allocate(slices * tokens);
    last_g = allocate(slices * heads_of_states);
    gk = allocate(has_gk ? slices * keys : 0);
    last_gk = allocate(has_gk ? slices * heads_of_states * in.key_dim : 0);
    end = next;
  }
  float* end;
};

inline int delta_backward_columns(const DeltaRuleInputs& in) { return in.key_dim <= 128 ? 128 : 64; }

inline int64_t delta_rule_workspace(const DeltaRuleInputs& in) {
  const DeltaBackwardSums sums(in, delta_backward_columns(in), nullptr);
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(sums.end));
}

// Sum one value per state row over a warp's eight columns. Each of three exchanges halves the number of
// values. The thread of column c then has the sums of rows c, c + 8 and so on of its kRows rows.
template <int kRows>
__device__ __forceinline__ void column_sums(float (&values)[kRows], float (&sums)[kRows / 8]) {
  float half[kRows / 2], quarter[kRows / 4];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const float own = lane & 4 ? values[2 * i + 1] : values[2 * i], sent = lane & 4 ? values[2 * i] : values[2 * i + 1];
    half[i] = own + __shfl_xor_sync(kAllLanes, sent, 4);
  }
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const float own = lane & 8 ? half[2 * i + 1] : half[2 * i], sent = lane & 8 ? half[2 * i] : half[2 * i + 1];
    quarter[i] = own + __shfl_xor_sync(kAllLanes, sent, 8);
  }
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i) {
    const float own = lane & 16 ? quarter[2 * i + 1] : quarter[2 * i];
    const float sent = lane & 16 ? quarter[2 * i] : quarter[2 * i + 1];
    sums[i] = own + __shfl_xor_sync(kAllLanes, sent, 16);
  }
}

// Sums of one token over all columns of a CTA: one per row of the state, and two scalars.
template <int kKeys, int kColumns>
struct DeltaColumnSums {
  static constexpr int kWarps = kColumns / 8;

  float rows[kWarps][kKeys];
  float scalars[kWarps][2];

  template <int kRows>
  __device__ __forceinline__ void store_rows(float (&values)[kRows]) {
    float sums[kRows / 8];
    column_sums(values, sums);
    const int column = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) rows[threadIdx.x / 32][DeltaState<kRows>::row(8 * i + column)] = sums[i];
  }
  // The four threads of a column pass the same two values. Even threads sum the first, odd ones the second.
  __device__ __forceinline__ void store_scalars(float first, float second) {
    float own_value = threadIdx.x % 2 ? second : first;
#pragma unroll
    for (int by = 4; by < 32; by *= 2) own_value += __shfl_xor_sync(kAllLanes, own_value, by);
    if (threadIdx.x % 32 < 2) scalars[threadIdx.x / 32][threadIdx.x % 32] = own_value;
  }
  __device__ __forceinline__ float row(int d) const {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += rows[warp][d];
    return total;
  }
  __device__ __forceinline__ float scalar_sum(int which) const {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += scalars[warp][which];
    return total;
  }
};

}  // namespace flashinfer::cuda
