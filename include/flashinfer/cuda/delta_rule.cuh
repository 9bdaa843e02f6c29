// The delta rule on CUDA, token by token in float: a block has 32 columns of a head's state in registers.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/delta_columns.cuh>
#include <flashinfer/cuda/delta_step_ring.cuh>

namespace flashinfer::cuda {

constexpr int kDeltaColumns = 32;

template <typename Columns, int kRows>
__device__ __forceinline__ void store_columns(Columns& columns, const DeltaState<kRows>& state,
                                              const DeltaRuleParams& p, void* states, int64_t head, int64_t first) {
  __syncthreads();
  state.give(columns);
  columns.store(states, p.state_dtype, DeltaPlace(p.in, head, first));
}

template <typename T, int kRows, bool kRowGate>
__global__ void __launch_bounds__(4 * kDeltaColumns, kRows == 16 ? 6 : 128 / kRows)
    delta_rule_kernel(const DeltaRuleParams p) {
  using Tokens = DeltaTokens<kRows, kDeltaColumns, kRows == 64 ? 8 : 16, kRowGate>;
  using Columns = DeltaColumns<4 * kRows, kDeltaColumns>;
  __shared__ __align__(16) union {
    Tokens tokens;
    Columns columns;
  } shared;
  wait_for_inputs();
  const DeltaRuleInputs& in = p.in;
  const DeltaBlock block(in, kDeltaColumns);
  const int64_t slot = p.slots.data ? p.slots[block.sequence] : block.sequence;
  const int64_t to_slot = p.output_slots.data ? p.output_slots[block.sequence] : slot;
  const int64_t column = block.slice * kDeltaColumns + DeltaState<kRows>::column();
  const bool writes = DeltaState<kRows>::part() == 0 && column < in.value_dim;
  T* o = static_cast<T*>(p.o) + column;
  if (slot < 0 || slot >= p.num_slots) {
    for (int64_t t = block.tokens.begin; writes && t < block.tokens.end; ++t)
      o[block.number(in, t) * in.value_dim] = from_float<T>(0.f);
    return;
  }
  const float scale = static_cast<float>(in.scale.get());
  const StepGate gate(p, block.value_head);
  DeltaState<kRows> state;
  const int64_t heads = in.num_value_heads, first_column = block.slice * kDeltaColumns;
  shared.columns.load(p.initial_state, p.state_dtype, DeltaPlace(in, slot * heads + block.value_head, first_column));
  state.take(shared.columns);
  // A snapshot overwrites the tokens in shared memory.
  const int step = p.snapshots ? 1 : Tokens::kTokens;
  for (int64_t first = block.tokens.begin; first < block.tokens.end; first += step) {
    __syncthreads();
    shared.tokens.template load<T>(in, block, first, gate);
    const int64_t left = block.tokens.end - first;
    const int count = left < step ? static_cast<int>(left) : step;
    for (int i = 0; i < count; ++i) {
      float k[kRows], q[kRows];
      state.load_row(shared.tokens.k[i], k);
      state.load_row(shared.tokens.q[i], q);
      state.template decay<kRowGate>(shared.tokens.decay[i]);
      const int mine = DeltaState<kRows>::column();
      const float u = shared.tokens.beta[i][mine] * (shared.tokens.v[i][mine] - state.dot(k));
      state.add(k, u);
      const float out = scale * state.dot(q);
      if (writes) o[block.number(in, first + i) * in.value_dim] = from_float<T>(out);
      if (p.snapshots) {  // one token at a time then, see below
        const int64_t row = block.sequence * p.snapshot_rows + first - block.tokens.begin;
        store_columns(shared.columns, state, p, p.snapshots, row * heads + block.value_head, first_column);
      }
    }
  }
  if (p.final_state && to_slot >= 0 && to_slot < p.num_slots)
    store_columns(shared.columns, state, p, p.final_state, to_slot * heads + block.value_head, first_column);
}

template <typename T>
void delta_rule(const DeltaRuleParams& p, const Launch& where) {
  if (takes_step(p)) {
    if (!delta_step_ring<T>(p, where)) delta_step<T>(p, where);
    return;
  }
  const auto blocks = static_cast<unsigned>(delta_blocks(p.in, kDeltaColumns));
  with_delta_shape(p.in, [&](auto rows, auto row_gate) {
    launch(delta_rule_kernel<T, rows(), row_gate()>, blocks, 4 * kDeltaColumns, 0, where, p);
  });
}

}  // namespace flashinfer::cuda
