// The delta rule on CUDA, token by token in float32. common/delta_rule.h has the equations and symbols.
//
// A CTA has 64 columns of a head's state in registers. One pass over the state before its update gives both
// products with k and q, because S' q = S~' q + u (k' q), where ' transposes and S~ is the decayed state.
#pragma once

#include <type_traits>

#include <flashinfer/cuda/delta_rule/columns.cuh>
#include <flashinfer/cuda/delta_rule/recurrent/panel.cuh>
#include <flashinfer/cuda/delta_rule/step/step.cuh>

namespace flashinfer::cuda {

// Shape of a CTA. Eight threads share four columns, and each has kRows rows of them.
template <int kRows>
struct DeltaRuleShape {
  static constexpr int kKeys = 8 * kRows, kColumns = kRows == 32 ? 32 : 64, kThreads = 2 * kColumns;
  static constexpr int kTokens = kRows == 32 ? 8 : 16;                     // in smem at a time, a divisor of 64
  static constexpr int kCtasPerSm = kRows == 8 ? 3 : kRows == 16 ? 2 : 4;  // CTAs per SM, at least
};

constexpr float kMinScale = 1e-9f;

template <typename Columns, int kRows>
__device__ __forceinline__ void store_columns(Columns& columns, const DeltaPanel<kRows>& state,
                                              const DeltaRuleInputs& in, void* states, DType dtype, int64_t head,
                                              int64_t first) {
  __syncthreads();
  state.store_to(columns);
  columns.store(states, dtype, DeltaStateView(in, head, first));
}

template <typename T, int kRows, bool kChannels>
__global__ void __launch_bounds__(DeltaRuleShape<kRows>::kThreads, DeltaRuleShape<kRows>::kCtasPerSm)
    delta_rule_kernel(const DeltaRuleParams p) {
  using Shape = DeltaRuleShape<kRows>;
  using Panel = DeltaPanel<kRows>;
  using Tokens = DeltaTokens<2 * kRows, Shape::kColumns, Shape::kTokens, kChannels, Shape::kThreads>;
  using Columns = DeltaColumns<Shape::kKeys, Shape::kColumns, Shape::kThreads>;
  __shared__ __align__(16) union {
    Tokens tokens;
    Columns columns;
  } shared;
  __shared__ float qk[Tokens::kTokens];  // q k'
  wait_for_inputs();
  const DeltaRuleInputs& in = p.in;
  const DeltaWork work(in, Shape::kColumns);
  const int64_t slot = p.slots.data ? p.slots[work.sequence] : work.sequence;
  const int64_t output_slot = p.output_slots.data ? p.output_slots[work.sequence] : slot;
  const int own_column = Panel::product_column();
  const int64_t heads = in.num_value_heads, first_column = work.slice * Shape::kColumns;
  const bool writes = Panel::is_query_product() && first_column + own_column < in.value_dim;
  const int64_t stride = heads * in.value_dim;  // between tokens of the output
  T* o = static_cast<T*>(p.o) + work.token_index(in, work.tokens.begin) * in.value_dim + first_column + own_column;
  if (slot < 0 || slot >= p.num_slots) {
    for (int64_t t = work.tokens.begin; writes && t < work.tokens.end; ++t, o += stride) *o = from_float<T>(0.f);
    return;
  }
  const float scale = static_cast<float>(in.scale.get());
  const StepGate gate(p, work.value_head);
  Panel state;
  shared.columns.load(p.initial_slot(slot), p.state_dtype, DeltaStateView(in, work.value_head, first_column));
  state.load_from(shared.columns);
  // Storing a snapshot overwrites the tokens in smem. With snapshots, tokens are therefore loaded one by one.
  const int step = p.snapshots ? 1 : Tokens::kTokens;
  for (int64_t first = work.tokens.begin; first < work.tokens.end; first += step) {
    __syncthreads();
    shared.tokens.template load<T>(in, work, first, gate);
    shared.tokens.dot_q_k(qk);
    const int64_t left = work.tokens.end - first;
    const int count = left < step ? static_cast<int>(left) : step;
    // The state is the registers times `pending_decay`, the product of the decays since the last scaling. The
    // registers are scaled once per group of tokens.
    float pending_decay = 1;
#pragma unroll 1
    for (int i = 0; i < count; ++i, o += stride) {
      float k[kRows], q[kRows], product;
      Panel::load_row(shared.tokens.k[i], k);
      Panel::load_row(shared.tokens.q[i], q);
      if constexpr (kChannels) {
        float decay[kRows];
        Panel::load_row(shared.tokens.decay[i], decay);
        state.scale_rows([&](int j) { return decay[j]; });
        product = state.products(k, q);
      } else {
        pending_decay *= shared.tokens.decay[i][0];
        if (!(pending_decay > kMinScale && pending_decay < 1 / kMinScale)) {  // its reciprocal must be finite
          state.scale(pending_decay);
          pending_decay = 1;
        }
        product = pending_decay * state.products(k, q);
      }
      const float new_value = shared.tokens.beta[i][own_column] * (shared.tokens.v[i][own_column] - product);
      const float added = kChannels ? new_value : __fdividef(new_value, pending_decay);
      float u[Panel::kColumns];
#pragma unroll
      for (int c = 0; c < Panel::kColumns; ++c) u[c] = Panel::of_column(added, c);
      const float out = scale * fmaf(qk[i], Panel::of_column(new_value, own_column % Panel::kColumns), product);
      state.add(k, u);
      if (writes) *o = from_float<T>(out);
      if (p.snapshots) {  // the group has one token, see `step`
        state.scale(pending_decay);
        pending_decay = 1;
        const int64_t row = work.sequence * p.snapshot_rows + first - work.tokens.begin;
        store_columns(shared.columns, state, in, p.snapshots, p.state_dtype, row * heads + work.value_head,
                      first_column);
      }
    }
    if constexpr (!kChannels) state.scale(pending_decay);
    // A group of tokens ends at every checkpoint. All threads of the CTA find the same row, and load the next
    // tokens after a barrier.
    const int64_t row = p.checkpoint_row(work.sequence, first + count - work.tokens.begin);
    if (row >= 0)
      store_columns(shared.columns, state, in, p.checkpoints, p.checkpoint_dtype, row * heads + work.value_head,
                    first_column);
  }
  if (p.final_state && output_slot >= 0 && output_slot < p.num_slots)
    store_columns(shared.columns, state, in, p.final_slot(output_slot), p.state_dtype, work.value_head, first_column);
}

template <typename T>
void delta_rule(const DeltaRuleParams& p, const Launch& where) {
  if (supports_step(p)) return delta_step<T>(p, where);
  with_delta_shape(p.in, [&](auto rows, auto channels) {
    using Shape = DeltaRuleShape<rows() / 2>;
    const auto blocks = static_cast<unsigned>(delta_blocks(p.in, Shape::kColumns));
    launch(delta_rule_kernel<T, rows() / 2, channels()>, blocks, Shape::kThreads, where, p);
  });
}

}  // namespace flashinfer::cuda
