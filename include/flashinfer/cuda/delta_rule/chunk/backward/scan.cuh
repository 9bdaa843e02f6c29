// Second kernel of the chunk gradients, with two independent scans in one launch. DeltaRecomputeScan computes
// the states and residuals r of all chunks again. DeltaBackwardScan computes D, the gradient of the state
// after a chunk, from the last chunk to the first:
//   du = P' dO + e^(Gn-G) K D    dy = du - Z' (B du)    dR = B dy = dV
//   D = e^Gn D + scale Q' (e^G dO) - K' (e^G dR)
// Both store operands of the next kernel to the workspace: the first S before each chunk and r, the second D
// after each chunk. dy is stored in dV's memory. chunk.cuh has the other symbols.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/mainloop.cuh>

namespace flashinfer::cuda {

// Workspace: terms, states, their gradients and residuals, each for all chunks and value heads. A state has
// blocks [columns / 16, kKeys / 16]. Residuals are r transposed, blocks [columns / 16, 4]. Columns are padded
// to slices of 64.
struct DeltaBackwardWorkspace {
  int64_t strips, state_bytes, residual_bytes;
  DeltaTerms* terms;  // or DeltaChannelTerms
  char *states, *grads, *residuals;
  float* sums;  // dq and dk that are accumulated over value heads or key parts
  char* end;

  FLASHINFER_HD DeltaBackwardWorkspace(const DeltaRuleInputs& in, int keys, int64_t chunks, void* workspace)
      : strips((in.value_dim + 63) / 64 * 4),
        state_bytes(strips * keys / 16 * 512),
        residual_bytes(strips * kDeltaChunk / 16 * 512) {
    const int64_t count = chunks * in.num_value_heads;
    char* next = static_cast<char*>(workspace);
    terms = reinterpret_cast<DeltaTerms*>(next), next += count * delta_term_bytes(in);
    states = next, next += count * state_bytes;
    grads = next, next += count * state_bytes;
    residuals = next, next += count * residual_bytes;
    sums = reinterpret_cast<float*>(next);
    if (in.gk ? in.group() > 1 : keys > 128 && in.l2norm)
      next += chunks * in.num_heads * kDeltaChunk * 2 * keys * static_cast<int64_t>(sizeof(float));
    end = next;
  }
};

// Staging blocks of a warp for bulk copies.
template <typename Shape>
struct DeltaStateStaging {
  DeltaBlock16 state[Shape::kPartKeys / 16];
};
template <typename Shape>
struct DeltaResidualStaging : DeltaStateStaging<Shape> {
  DeltaBlock16 r[kDeltaChunk / 16];
};

// Bytes of smem after the stages: staging blocks of all warps, then the exchange buffer for sums of key
// parts.
template <typename Shape, typename Staging>
constexpr int kDeltaStagingBytes = Shape::kWgmma ? Shape::kWarps * static_cast<int>(sizeof(Staging)) : 0;
template <typename Shape, typename Staging>
constexpr int kDeltaTailBytes =
    kDeltaStagingBytes<Shape, Staging> + (Shape::kParts > 1 ? static_cast<int>(sizeof(DeltaPartSums<Shape>)) : 0);

template <typename Shape>
struct DeltaRecomputeStage : DeltaKeyRows<Shape, Shape::kChannels> {
  using Staging = DeltaResidualStaging<Shape>;
  static constexpr int kTailBytes = kDeltaTailBytes<Shape, Staging>;
  alignas(128) typename Shape::Values v;
  typename Shape::TermsWithoutP terms;
};

template <typename Shape>
struct DeltaRecomputeScan : DeltaScan<Shape> {
  using Base = DeltaScan<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaRecomputeStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps;

  const DeltaBackwardWorkspace& workspace;
  typename Stage::Staging* staging;
  DeltaPartSums<Shape>* part_sums;

  __device__ __forceinline__ DeltaRecomputeScan(const DeltaRuleInputs& inputs, const DeltaBackwardWorkspace& to,
                                                void* after_stages, uint32_t number)
      : Base(inputs, number),
        workspace(to),
        staging(static_cast<typename Stage::Staging*>(after_stages) + threadIdx.x / 32),
        part_sums(reinterpret_cast<DeltaPartSums<Shape>*>(static_cast<char*>(after_stages) +
                                                          kDeltaStagingBytes<Shape, typename Stage::Staging>)) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const auto& chunk_terms = static_cast<const typename Shape::ChunkTerms*>(workspace.terms)[this->index(number)];
    this->load_keys(to, chunk_terms, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_terms(to.terms, chunk_terms);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators r;
    typename Base::OperandA left, values;
    const int64_t strip = this->column() / 16, index = this->index(number);
    const bool inside = strip < workspace.strips;
    this->pack_state(a, state);
    char* const states =
        workspace.states + index * workspace.state_bytes + this->state_block(strip) * sizeof(DeltaBlock16);
    if constexpr (Shape::kWgmma) {
      Products::multiply_state(r, a, this->key_part(stage.k));
      this->template store_blocks<1>(states, staging->state, a, inside);
    } else {
      Products::multiply_state(r, a, this->key_part(stage.k), this->block_writer(states, a, inside));
    }
    this->load_values(values, stage.v);
    Products::template wait<0>(r, a);
    this->template reduce_key_parts<true>(r, part_sums);
    this->finish_residuals(r, left, values, terms);
    this->decay(state, stage);
    Products::template wait<0>(r, left);
    typename Base::OperandA residuals;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      pack_operand_a<T>(residuals[m], r[0][2 * m], r[0][2 * m + 1]);
      this->scale_tokens(r, m, terms.beta);
    }
    this->pack_scaled(left, r, terms.update_decay);
    char* const to = workspace.residuals + index * workspace.residual_bytes + strip * sizeof(staging->r);
    const bool first = inside && this->part == 0;
    if constexpr (Shape::kWgmma) {
      Products::update_state(state, left, this->key_part(stage.update_rows()));
      this->template store_blocks<1>(to, staging->r, residuals, first);
    } else {
      Products::update_state(state, left, this->key_part(stage.update_rows()),
                             this->block_writer(to, residuals, first));
    }
    Products::template wait<0>(state, left);
  }
};

template <typename Shape>
struct DeltaBackwardStage : DeltaKeyRows<Shape, Shape::kChannels> {
  using Staging = DeltaStateStaging<Shape>;
  static constexpr int kTailBytes = kDeltaTailBytes<Shape, Staging>;
  alignas(Shape::kAlign) typename Shape::KeyTiles q;
  alignas(128) typename Shape::Values grad;  // dO, overwritten by dy
  typename Shape::Terms terms;
};

template <typename Shape>
struct DeltaBackwardScan : DeltaScan<Shape> {
  using Base = DeltaScan<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaBackwardStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps;

  const DeltaRuleBackwardParams& p;
  const DeltaBackwardWorkspace& workspace;
  typename Stage::Staging* staging;
  DeltaPartSums<Shape>* part_sums;

  __device__ __forceinline__ DeltaBackwardScan(const DeltaRuleBackwardParams& params, const DeltaBackwardWorkspace& to,
                                               void* after_stages, uint32_t number)
      : Base(params.in, number),
        p(params),
        workspace(to),
        staging(static_cast<typename Stage::Staging*>(after_stages) + threadIdx.x / 32),
        part_sums(reinterpret_cast<DeltaPartSums<Shape>*>(static_cast<char*>(after_stages) +
                                                          kDeltaStagingBytes<Shape, typename Stage::Staging>)) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const int64_t heads = in.num_value_heads, values = in.value_dim;
    const auto& chunk_terms = static_cast<const typename Shape::ChunkTerms*>(workspace.terms)[this->index(number)];
    this->load_keys(to, chunk_terms, chunk), this->load_queries(to, chunk_terms, chunk);
    this->copy_values(to.grad, p.grad_o, {in.num_tokens * heads * values, heads * values, values}, chunk);
    this->copy_terms(to.terms, chunk_terms);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    const int64_t strip = this->column() / 16, index = this->index(number);
    const bool inside = strip < workspace.strips;
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators du, output_terms;
    typename Base::OperandA grad, left;
    this->load_values(grad, stage.grad);
    this->pack_state(a, state);
    char* const grads =
        workspace.grads + index * workspace.state_bytes + this->state_block(strip) * sizeof(DeltaBlock16);
    if constexpr (Shape::kWgmma) {
      Products::multiply_state(du, a, this->key_part(stage.update_rows()));
      Products::template multiply<false, true>(output_terms, grad, terms.p);
      this->template store_blocks<0>(grads, staging->state, a, inside);
    } else {
      Products::multiply_state(du, a, this->key_part(stage.update_rows()), this->block_writer(grads, a, inside));
      Products::template multiply<false, true>(output_terms, grad, terms.p);
    }
    Products::template wait<1>(du, a);
    this->template reduce_key_parts<true>(du, part_sums);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scale_tokens(du, m, terms.update_decay);
    Products::template wait<0>(output_terms, grad);
#pragma unroll
    for (int n = 0; n < Base::TokenAccumulators::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) du[0][n][i] += output_terms[0][n][i];
    }
    this->pack_scaled(left, du, terms.beta);
    Products::template multiply<false>(du, left, terms.z);  // dy
    this->decay(state, stage);
    this->scale_values(grad, terms.q_decay);
    Products::update_state(state, grad, this->key_part(stage.q));
    Products::template wait<1>(du, left);
    typename Base::TokenAccumulators values = du;  // dV
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(values, m, terms.beta);
      this->pack_scaled(left[m], values, m, terms.k_decay, -1.f);
    }
    Products::update_state(state, left, this->key_part(stage.k));
    if (Shape::kParts == 1 || this->part == 0) {
      this->template store<true>(p.grad_v, stage.grad, this->chunk(number), [&](uint32_t (&four)[4], int m) {
        pack_finite_operand_a<T>(four, du[0][2 * m], du[0][2 * m + 1]);
      });
    }
    Products::template wait<0>(state, grad, left);
  }
};

// Recompute states and residuals. `number` is the CTA's index among those that recompute.
template <typename Shape>
__device__ __forceinline__ void recompute_chunks(const DeltaRuleBackwardParams& p,
                                                 const DeltaBackwardWorkspace& workspace, unsigned char* memory,
                                                 uint32_t number) {
  using Stage = DeltaRecomputeStage<Shape>;
  const DeltaRecomputeScan<Shape> recompute(p.in, workspace, memory + kScanBytes<Shape, Stage> - Stage::kTailBytes,
                                            number);
  scan_chunks<Shape, false>(recompute, reinterpret_cast<Stage*>(memory), p.initial_state, nullptr);
}

template <typename Shape>
constexpr int kBothScansBytes =
    kScanBytes<Shape, DeltaRecomputeStage<Shape>> > kScanBytes<Shape, DeltaBackwardStage<Shape>>
        ? kScanBytes<Shape, DeltaRecomputeStage<Shape>>
        : kScanBytes<Shape, DeltaBackwardStage<Shape>>;

// The first half of the CTAs scan backwards, which takes longer.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm)
    delta_backward_scans_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_inputs();
  const DeltaBackwardWorkspace workspace(p.in, Shape::kKeys, chunks, p.workspace);
  const uint32_t scans = gridDim.x / 2;
  if (blockIdx.x < scans) {
    using Stage = DeltaBackwardStage<Shape>;
    const DeltaBackwardScan<Shape> backward(p, workspace, memory + kScanBytes<Shape, Stage> - Stage::kTailBytes,
                                            blockIdx.x);
    scan_chunks<Shape, true>(backward, reinterpret_cast<Stage*>(memory), p.grad_state, p.grad_initial_state);
  } else {
    recompute_chunks<Shape>(p, workspace, memory, blockIdx.x - scans);
  }
}

}  // namespace flashinfer::cuda
