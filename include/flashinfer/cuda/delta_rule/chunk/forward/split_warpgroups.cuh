// Forward scan on Hopper for calls with fewer heads than SMs.
//
// One warpgroup advances the states of 64 columns, and stores states and u to a ring in smem. From these, a
// second warpgroup computes outputs, with tokens as rows. A third one is the producer. If many SMs are idle,
// more CTAs of the launch prepare the terms of chunks while the scan runs.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/forward/kernel.cuh>
#include <flashinfer/cuda/delta_rule/chunk/prepare.cuh>
#include <flashinfer/cuda/ptx/atomic.cuh>

namespace flashinfer::cuda {

template <typename T, int kKeys, bool kChannels = false>
struct DeltaSplitWarpgroupShape : DeltaWarpgroupShape<T, kKeys, 1, kChannels> {
  static constexpr int kThreads = 384, kStages = kChannels && kKeys > 64 ? 2 : 3, kStateStages = 2, kCtasPerSm = 1;
};

// States and u of 64 columns as B operands: tiles with a row of 128 bytes per column.
template <typename Shape>
struct DeltaStateTiles {
  alignas(1024) uint4 state[Shape::kColumns][Shape::kKeys / 8];
  alignas(1024) uint4 u[Shape::kColumns][kDeltaChunk / 8];
};
template <typename Shape>
struct DeltaSplitWarpgroupShared {
  DeltaForwardStage<Shape> stages[Shape::kStages];
  DeltaStateTiles<Shape> state_stages[Shape::kStateStages];
};

template <typename Shape>
struct DeltaSplitWarpgroups : DeltaForwardScan<Shape> {
  using Base = DeltaForwardScan<Shape>;
  using T = typename Shape::T;
  using Stage = typename Base::Stage;
  using State = typename Base::State;
  using Products = typename Shape::Products;
  using StateTiles = DeltaStateTiles<Shape>;
  using Tile = ChunkedTile<kDeltaChunk>;
  using Base::kSteps, Base::lane, Base::warp;

  enum Role { kStateRole, kOutputRole, kProducerRole };
  const int role;

  __device__ __forceinline__ DeltaSplitWarpgroups(const DeltaRuleParams& params, uint32_t block)
      : Base(params, block), role(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0)) {
    warp %= Shape::kWarps;
  }

  // Advance the state over a chunk. Store the old state and u to `to`.
  __device__ __forceinline__ void advance_state(Stage& stage, StateTiles& to, State& state) const {
    const auto& terms = stage.terms;
    typename Base::StateOperandA a;
    typename Base::TokenAccumulators r;
    typename Base::OperandA left, values;
    this->pack_state(a, state);
    Products::multiply_state(r, a, this->key_part(stage.k));
    store_operand(ptx::shared_address(to.state), a);
    this->load_values(values, stage.v);
    Products::template wait<0>(r, a);
    this->finish_residuals(r, left, values, terms);
    this->decay(state, stage);
    Products::template wait<0>(r, left);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) this->scale_tokens(r, m, terms.beta);
    this->pack_scaled(left, r, terms.update_decay);
    Products::update_state(state, left, this->key_part(stage.update_rows()));
    typename Base::OperandA u;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) pack_operand_a<T>(u[m], r[0][2 * m], r[0][2 * m + 1]);
    store_operand(ptx::shared_address(to.u), u);
    Products::template wait<0>(state, left);
  }

  // Compute O = scale e^G Q S + P u. Rows are tokens, and each warp has 16.
  __device__ __forceinline__ void compute_output(DeltaSums16& o, const Stage& stage, const StateTiles& from) const {
    constexpr auto kType = Products::kType;
    const uint64_t queries = Tile::k_contiguous(ptx::shared_address(stage.q));
    const uint64_t states = Tile::k_contiguous(ptx::shared_address(from.state));
    auto& sums = reinterpret_cast<float (&)[kDeltaChunk / 2]>(o.tile);
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      const uint64_t by = Tile::k_contiguous_step(step);
      ptx::Wgmma<kDeltaChunk>::template ss<kType, false>(sums, queries + by, states + by, step > 0);
    }
    ptx::warpgroup_commit();
    const int row = 16 * warp + lane / 4;
    const float upper = stage.terms.q_decay[row], lower = stage.terms.q_decay[row + 8];
    Products::template wait<0>(o);
#pragma unroll
    for (int n = 0; n < DeltaSums16::kN; ++n)
      o[0][n][0] *= upper, o[0][n][1] *= upper, o[0][n][2] *= lower, o[0][n][3] *= lower;
    const uint64_t p = Tile::k_contiguous(ptx::shared_address(stage.terms.p));
    const uint64_t u = Tile::k_contiguous(ptx::shared_address(from.u));
    ptx::warpgroup_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint64_t by = Tile::k_contiguous_step(step);
      ptx::Wgmma<kDeltaChunk>::template ss<kType, false>(sums, p + by, u + by, true);
    }
    ptx::warpgroup_commit();
    Products::template wait<0>(o);
  }

  // Store O through the tile of v, which is no longer read.
  __device__ __forceinline__ void store_output(const DeltaSums16& o, Stage& stage, int64_t number) const {
    using Rows = Swizzle<Shape::kValueBytes>;
    const DeltaChunk chunk = this->chunk(number);
    const uint32_t start = ptx::shared_address(stage.v), own_row = Rows::row(start, 16 * warp + lane % 16);
#pragma unroll
    for (int pair = 0; pair < kSteps; ++pair) {
      uint32_t four[4];
      pack_operand_a<T>(four, o[0][2 * pair], o[0][2 * pair + 1]);
      ptx::stmatrix_x4(Rows::chunk(own_row, 2 * pair + lane / 16), four[0], four[1], four[2], four[3]);
    }
    __syncwarp();
    constexpr int kUnits = Shape::kColumns / 8;
    const int64_t v = this->work.slice * Shape::kColumns + lane % kUnits * 8;
#pragma unroll
    for (int i = 0; i < 16 * kUnits / 32; ++i) {
      const int token = 16 * warp + i * (32 / kUnits) + lane / kUnits;
      const uint4 eight = ptx::load_shared_16(Rows::chunk(Rows::row(start, token), lane % kUnits));
      if (token < chunk.count && v < this->in.value_dim)
        *reinterpret_cast<uint4*>(static_cast<T*>(this->p.o) +
                                  this->work.token_index(this->in, chunk.first + token) * this->in.value_dim + v) =
            eight;
    }
  }

 private:
  // Store an A operand of this warp's columns as rows of a tile.
  template <int kCount>
  __device__ __forceinline__ void store_operand(uint32_t tile, const uint32_t (&left)[kCount][4]) const {
    const int row = 16 * warp + lane % 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      ptx::stmatrix_x4(tile + Tile::unit(row, 2 * i + lane / 16), left[i][0], left[i][1], left[i][2], left[i][3]);
  }
};

// Ready flags of terms that the first `blocks` CTAs of the same launch prepare. The preparing CTAs never
// wait. CUDA does not define the order in which CTAs start. The launch therefore has at most one CTA per SM
// (delta_preparing_blocks): all run at once, and none waits for a CTA that cannot start. The sequences
// advance in lockstep. With blocks = 0 all terms are ready.
struct DeltaTermFlags {
  uint32_t blocks;
  uint32_t* flags;  // per chunk and value head, initially 0

  // Wait at every kAhead-th chunk for the flags of kAhead chunks, one per lane. One read takes nearly as
  // long as a chunk, so flags are not read one by one.
  static constexpr int kAhead = 8;
  template <typename Scan>
  __device__ __forceinline__ void wait(const Scan& scan, int chunk, int count) const {
    if (blocks == 0 || chunk % kAhead != 0) return;
    const int flagged_chunk = chunk + scan.lane % kAhead;
    if (flagged_chunk < count)
      while (ptx::load_acquire(flags + scan.index(flagged_chunk)) == 0) __nanosleep(64);
    __syncwarp();
  }
};

// Prepare terms in three groups of threads, each with one chunk and value head at a time.
template <typename Shape>
__device__ __forceinline__ void prepare_chunks(const DeltaRuleParams& p, const DeltaTermFlags& ready, void* memory) {
  using Prepare = DeltaPrepare<typename Shape::T, Shape::kKeys>;
  constexpr int kGroups = Shape::kThreads / Prepare::kThreads;
  const DeltaRuleInputs& in = p.in;
  const int group = static_cast<int>(threadIdx.x) / Prepare::kThreads;
  auto& shared = static_cast<typename Prepare::Shared*>(memory)[group];
  const Prepare prepare(in, shared, static_cast<int>(threadIdx.x) % Prepare::kThreads, 1 + group);
  const auto heads = static_cast<uint32_t>(in.num_value_heads), sequences = static_cast<uint32_t>(in.num_sequences);
  const auto units = static_cast<uint32_t>(first_chunk(in, in.num_sequences)) * heads,
             chunks = units / heads / sequences;
  const float scale = static_cast<float>(in.scale.get());
  for (uint32_t unit = blockIdx.x * kGroups + group; unit < units; unit += ready.blocks * kGroups) {
    const uint32_t chunk_number = unit / heads, head = unit - chunk_number * heads;
    const uint32_t chunk = chunk_number / sequences, sequence = chunk_number - chunk * sequences;
    const int64_t index = (int64_t{sequence} * chunks + chunk) * heads + head;
    prepare.run({sequence_of(in, sequence), chunk}, head, scale, static_cast<DeltaTerms*>(p.workspace)[index]);
    __threadfence();
    ptx::named_barrier<Prepare::kThreads>(1 + group);
    if (prepare.thread == 0) ptx::store_release(ready.flags + index, 1);
  }
}

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    delta_split_warpgroups_kernel(const DeltaRuleParams p, const DeltaTermFlags ready) {
  if constexpr (is_compiled<Shape>()) {
    extern __shared__ __align__(1024) unsigned char memory[];
    using Split = DeltaSplitWarpgroups<Shape>;
    auto& shared = *reinterpret_cast<DeltaSplitWarpgroupShared<Shape>*>(memory);
    static_assert(sizeof(shared) <= 226 * 1024, "fits the smem of 9.0 next to barriers");
    constexpr int kStages = Shape::kStages, kStateStages = Shape::kStateStages;
    __shared__ uint64_t barriers[2 * kStages], state_barriers[2 * kStateStages];
    const Ring<kStages> ring{ptx::shared_address(barriers)};
    const Ring<kStateStages> state_ring{ptx::shared_address(state_barriers)};
    wait_for_inputs();
    if constexpr (!Shape::kChannels) {
      static_assert(sizeof(shared) >= Shape::kThreads / 128 * sizeof(DeltaPrepareShared<Shape::kKeys>));
      if (blockIdx.x < ready.blocks) return prepare_chunks<Shape>(p, ready, memory);
    }
    const Split split(p, blockIdx.x - ready.blocks);
    if (threadIdx.x == 0) {
      ring.init(Shape::kCopiers, 2 * Shape::kWarps), state_ring.init(Shape::kWarps, Shape::kWarps);
      ptx::mbarrier_fence_init();
    }
    clear_terms<Shape>(shared.stages, kStages);
    ptx::fence_proxy_async();
    __syncthreads();
    const int count = static_cast<int>(split.num_chunks());
    if (split.role == split.kProducerRole) {
      for (int i = 0; i < count; ++i) {
        ready.wait(split, i, count);
        ring.wait_empty(i);
        split.load(shared.stages[i % kStages], i);
        ptx::mbarrier_arrive_after_cp_async(ring.full(i));
      }
      ptx::cp_async_wait<0>();
    } else if (split.role == split.kOutputRole) {
      for (int i = 0; i < count; ++i) {
        auto& stage = shared.stages[i % kStages];
        ring.wait_full(i);
        state_ring.wait_full(i);
        ptx::fence_proxy_async();
        DeltaSums16 o;
        split.compute_output(o, stage, shared.state_stages[i % kStateStages]);
        if (split.lane == 0) state_ring.release(i);
        split.store_output(o, stage, i);
        __syncwarp();
        if (split.lane == 0) ring.release(i);
      }
    } else {
      typename Split::State state;
      state.clear();
      if (p.initial_state)
        split.for_state_elements(state,
                                 [&](float& one, int64_t i) { one = static_cast<const float*>(p.initial_state)[i]; });
      for (int i = 0; i < count; ++i) {
        state_ring.wait_empty(i);
        ring.wait_full(i);
        ptx::fence_proxy_async();  // wgmma reads tiles that cp.async wrote through the generic proxy
        split.advance_state(shared.stages[i % kStages], shared.state_stages[i % kStateStages], state);
        ptx::fence_proxy_async();
        __syncwarp();
        if (split.lane == 0) state_ring.arrive_full(i);
        if (split.lane == 0) ring.release(i);
      }
      if (p.final_state)
        split.for_state_elements(state, [&](float& one, int64_t i) { static_cast<float*>(p.final_state)[i] = one; });
    }
  }
}

}  // namespace flashinfer::cuda
