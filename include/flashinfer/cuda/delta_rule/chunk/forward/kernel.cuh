// Second kernel of the chunk form: the scan of a value head's states, and the outputs. chunk.cuh has the
// equations.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/mainloop.cuh>

namespace flashinfer::cuda {

template <typename Shape>
struct DeltaForwardStage : DeltaKeyRows<Shape, Shape::kChannels> {
  static constexpr int kTailBytes = Shape::kParts > 1 ? static_cast<int>(sizeof(DeltaPartSums<Shape>)) : 0;
  alignas(Shape::kAlign) typename Shape::KeyTiles q;
  alignas(128) typename Shape::Values v;  // overwritten by o
  typename Shape::Terms terms;
};

template <typename Shape>
struct DeltaForwardScan : DeltaScan<Shape> {
  using Base = DeltaScan<Shape>;
  using T = typename Shape::T;
  using Stage = DeltaForwardStage<Shape>;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using Base::in, Base::kSteps;

  const DeltaRuleParams& p;
  DeltaPartSums<Shape>* const part_sums;  // used with several key parts

  __device__ __forceinline__ explicit DeltaForwardScan(const DeltaRuleParams& params, uint32_t block = blockIdx.x,
                                                       void* tail = nullptr)
      : Base(params.in, block), p(params), part_sums(static_cast<DeltaPartSums<Shape>*>(tail)) {}

  __device__ __forceinline__ void load(Stage& to, int64_t number) const {
    const DeltaChunk chunk = this->chunk(number);
    const auto& chunk_terms = static_cast<const typename Shape::ChunkTerms*>(p.workspace)[this->index(number)];
    this->load_keys(to, chunk_terms, chunk), this->load_queries(to, chunk_terms, chunk);
    this->copy_values(to.v, in.v, in.v_strides, chunk);
    this->copy_terms(to.terms, chunk_terms);
  }

  __device__ __forceinline__ void advance(Stage& stage, int64_t number, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators r, o;
    typename Base::OperandA u, values_then_update;
    this->pack_state(a, state);
    Products::multiply_state(r, a, this->key_part(stage.k));
    this->load_values(values_then_update, stage.v);
    Products::template wait<0>(r, a);
    this->template reduce_key_parts<true>(r, part_sums);
    this->finish_residuals(r, u, values_then_update, terms);
    Products::multiply_state(o, a, this->key_part(stage.q));
    Products::template wait<1>(r, u);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(r, m, terms.beta);
      pack_operand_a<T>(u[m], r[0][2 * m], r[0][2 * m + 1]);
      this->pack_scaled(values_then_update[m], r, m, terms.update_decay);
    }
    this->decay(state, stage);
    Products::update_state(state, values_then_update, this->key_part(stage.update_rows()));
    Products::template wait<1>(o, a);
    this->template reduce_key_parts<false>(o, part_sums);
    if (Shape::kParts > 1 && this->part > 0) {
      Products::template wait<0>(state, values_then_update);
      return;
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scale_tokens(o, m, terms.q_decay);
    Products::template multiply<true>(o, u, terms.p);
    Products::template wait<0>(o, u, state, values_then_update);
    this->store(p.o, stage.v, this->chunk(number), o);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm) delta_forward_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  wait_for_inputs();
  using Stage = DeltaForwardStage<Shape>;
  const DeltaForwardScan<Shape> forward(p, blockIdx.x, memory + kScanBytes<Shape, Stage> - Stage::kTailBytes);
  scan_chunks<Shape, false>(forward, reinterpret_cast<Stage*>(memory), p.initial_state, p.final_state);
}

}  // namespace flashinfer::cuda
