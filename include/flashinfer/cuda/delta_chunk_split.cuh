// The chain of the delta rule over chunks where there are fewer heads than processors, and the time of one chunk is
// what counts: states go on without waiting for outputs. Two warps have 16 columns each; one carries the state and
// leaves it and u in shared memory, from where the other makes the chunk before's output. Two more warps start copies,
// two chunks ahead.
#pragma once

#include <flashinfer/cuda/delta_chunk_chain.cuh>

namespace flashinfer::cuda {

template <typename T, int kKeys>
struct DeltaSplitShape : DeltaWalkShape<T, kKeys, 2, 2> {
  static constexpr int kThreads = 192, kStages = 4;
};

template <typename Shape>
struct DeltaSplitShared {
  DeltaChainStage<Shape> stages[Shape::kStages];
  struct {  // left operands, 16 bytes of each lane
    DeltaBlocks state[Shape::kWarps][Shape::kKeys / 16];
    DeltaBlocks u[Shape::kWarps][kDeltaChunk / 16];
  } handed[2];
};

template <typename Shape>
struct DeltaSplit : DeltaChain<Shape> {
  using Base = DeltaChain<Shape>;
  using T = typename Shape::T;
  using Stage = typename Base::Stage;
  using State = typename Base::State;
  using Handed = decltype(DeltaSplitShared<Shape>::handed[0]);
  using Base::kSteps, Base::lane, Base::warp;

  const int role;  // 0: states, 1: outputs, 2: copies

  __device__ __forceinline__ explicit DeltaSplit(const DeltaRuleParams& params)
      : Base(params), role(threadIdx.x / 32 / Shape::kWarps) {
    warp %= Shape::kWarps;
  }

  __device__ __forceinline__ void carry(Stage& stage, Handed& to, State& state) const {
    const DeltaTerms& terms = stage.terms;
    typename Base::Sums r;
    r.clear();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      uint32_t a[1][4];
      pack_left<T>(a[0], state[0][2 * step], state[0][2 * step + 1]);
      to.state[warp][step][lane] = make_uint4(a[0][0], a[0][1], a[0][2], a[0][3]);
      this->read(r, a, stage.k, step);
    }
    this->subtract_from_values(r, stage.v, terms.read);
    typename Base::Left left;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scaled(left[m][0], r, m, terms.beta);
    this->template multiply<true>(r, left, terms.z);
    state.scale(terms.last[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[1][4];
      this->scale_tokens(r, step, terms.beta);
      pack_left<T>(a[0], r[0][2 * step], r[0][2 * step + 1]);
      to.u[warp][step][lane] = make_uint4(a[0][0], a[0][1], a[0][2], a[0][3]);
      this->scaled(a[0], r, step, terms.write);
      this->write(state, a, stage.k, step);
    }
  }

  __device__ __forceinline__ void output(Stage& stage, const Handed& from, int64_t number) const {
    typename Base::Sums o;
    o.clear();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      const uint4 four = from.state[warp][step][lane];
      const uint32_t a[1][4] = {{four.x, four.y, four.z, four.w}};
      this->read(o, a, stage.q, step);
    }
    typename Base::Left left;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      this->scale_tokens(o, m, stage.terms.out);
      const uint4 four = from.u[warp][m][lane];
      left[m][0][0] = four.x, left[m][0][1] = four.y, left[m][0][2] = four.z, left[m][0][3] = four.w;
    }
    this->template multiply<true>(o, left, stage.terms.p);
    this->store(this->p.o, stage.v, this->chunk(number), o);
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads) delta_split_kernel(const DeltaRuleParams p) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<DeltaSplitShared<Shape>*>(memory);
  wait_for_inputs();
  const DeltaSplit<Shape> split(p);
  const int64_t count = split.num_chunks();
  if (split.role == 2) {
    const auto load = [&](int64_t i) {
      if (i < count) split.load(shared.stages[i % Shape::kStages], i);
      ptx::cp_async_commit();
    };
    load(0), load(1);
    for (int64_t i = 0; i <= count; ++i) {
      ptx::cp_async_wait<1>();
      __syncthreads();
      load(i + 2);
    }
  } else if (split.role == 1) {
    __syncthreads();
    for (int64_t i = 0; i < count; ++i) {
      __syncthreads();  // the state and u of chunk i are there
      split.output(shared.stages[i % Shape::kStages], shared.handed[i % 2], i);
    }
  } else {
    typename DeltaSplit<Shape>::State state;
    state.clear();
    if (p.initial_state)
      split.for_state(state, [&](float& one, int64_t i) { one = static_cast<const float*>(p.initial_state)[i]; });
    for (int64_t i = 0; i < count; ++i) {
      __syncthreads();
      split.carry(shared.stages[i % Shape::kStages], shared.handed[i % 2], state);
    }
    __syncthreads();
    if (p.final_state)
      split.for_state(state, [&](float& one, int64_t i) { static_cast<float*>(p.final_state)[i] = one; });
  }
}

}  // namespace flashinfer::cuda
