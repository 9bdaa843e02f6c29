// Third kernel of the chunk gradients, parallel over chunks: dq, dk, dV, dbeta and dg. chunk.cuh has the
// forward equations, scan.cuh the equations of dy and D.
//   dP = scale lower(dO u') Gam    X = -strict lower(dR u') Gam    dq = dP k + scale e^G dO S'
//   row = -e^G dR S' + X k    col = dP' q + X' k + e^(Gn-G) u D'    dk = row + col
//   dbeta = <dy, r>, on the diagonal of dy r'    dV = dR = B dy
// dy and r come from different CTAs of scan.cuh, rounded to T. Of the error of dbeta in bfloat16, 3.4e-3,
// these two roundings are 1.6e-3 each. P, D and e^G dO, also operands of T, are 1.1e-3 to 1.4e-3 each. For
// similar keys the error is 8e-3: Z, P and B du are 4e-3 each.
//   dg_t = <D, S after the chunk> + sum over i >= t of <q_i, dq_i> + <k_i, row_i> - <k_i, col_i>
// If q and k are normalised, the sums are gradients times the L2 factor. On Hopper a CTA computes several
// chunks and copies the next one meanwhile.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/backward/slice.cuh>

namespace flashinfer::cuda {

// With kParts > 1 there are kParts * kKeys keys, computed part by part.
template <typename T_, int kKeys_, bool kWgmma_, int kParts_ = 1>
struct DeltaGradientShape {
  using T = T_;
  using Products = std::conditional_t<kWgmma_, DeltaWarpgroupGradients<T, kKeys_>, DeltaWarpGradients<T, kKeys_>>;
  static constexpr bool kWgmma = kWgmma_;
  static constexpr int kParts = kParts_;
  static constexpr int kKeys = kKeys_, kThreads = 256, kSlice = 64;  // columns at a time
  // Stages of rows of k and q, one per chunk and key part.
  static constexpr int kChunks = !kWgmma ? (kParts > 1 ? 2 : 1) : kKeys <= 64 ? 3 : 2;
  static constexpr int kHeads = kChunks == 3 ? 3 : 2;  // stages of factors, one per value head
};

template <typename Shape>
struct DeltaGradientsShared {
  using Rows = typename Shape::Products::Rows;
  using Matrix = typename Shape::Products::Matrix;
  using Stage = DeltaGradientStage<Shape>;
  alignas(1024) Rows k[Shape::kChunks];
  alignas(1024) Rows q[Shape::kChunks];
  Stage stages[2];
  alignas(1024) Matrix p;  // dP, and X
  alignas(1024) Matrix x;
  DeltaGradientFactors factors[Shape::kHeads];           // of this value head and the next one
  float q_dots[2][kDeltaChunk], k_dots[2][kDeltaChunk];  // <q, dq> and <k, dk> of each half of the keys
  float after[8];                                        // <D, S after the chunk>, partial sums of the warps
  float total_q[kDeltaChunk], total_k[kDeltaChunk];      // <q, dq> and <k, dk> of the previous key parts
  DeltaBackwardWorkspace workspace;
  GradientGrid grid;
  GradientCursor cursors[4];  // of this step and the next three
};

template <typename Shape>
struct DeltaGradients : DeltaGradientSlices<Shape> {
  using Base = DeltaGradientSlices<Shape>;
  using T = typename Shape::T;
  using Products = typename Shape::Products;
  using Shared = DeltaGradientsShared<Shape>;
  using Stage = typename Shared::Stage;
  using Rows = typename Products::Rows;
  using GradientSums = typename Products::Sums;
  using Sums = typename GradientSums::Keys;
  using Cursor = GradientCursor;
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads;
  using Base::half, Base::lane, Base::row, Base::rows, Base::thread;
  using Base::p, Base::in, Base::grid, Base::workspace, Base::pair_of, Base::row_dot;

  Shared& shared;

  __device__ __forceinline__ DeltaGradients(const DeltaRuleBackwardParams& params, Shared& memory)
      : Base(params, memory.grid, memory.workspace), shared(memory) {}

  __device__ __forceinline__ const Rows& keys(const Cursor& at) const {
    return shared.k[at.parts_done % Shape::kChunks];
  }
  __device__ __forceinline__ const Rows& queries(const Cursor& at) const {
    return shared.q[at.parts_done % Shape::kChunks];
  }

  // Issue the copies of a step, unless the CTA is done.
  __device__ __forceinline__ void load(Stage& to, const Cursor& at) const {
    if (!at.done(grid)) {
      if (at.slice == 0) {
        if (at.member == 0) {
          copy_tokens<T, 2 * kKeys, kThreads, kDeltaChunk>(ptx::shared_address(keys(at)), in.k, in.k_strides, at.chunk,
                                                           at.qk_head, this->part(at) * kKeys, in.key_dim, thread);
          copy_tokens<T, 2 * kKeys, kThreads, kDeltaChunk>(ptx::shared_address(queries(at)), in.q, in.q_strides,
                                                           at.chunk, at.qk_head, this->part(at) * kKeys, in.key_dim,
                                                           thread);
        }
        const auto& factors = static_cast<const DeltaGradientFactors&>(workspace.terms[at.index(in, grid)]);
        if (thread < sizeof(factors) / 16)
          ptx::cp_async_16(ptx::shared_address(&shared.factors[at.heads_done % Shape::kHeads]) + thread * 16,
                           reinterpret_cast<const char*>(&factors) + thread * 16);
      }
      this->load_slice(to, at);
    }
    ptx::cp_async_commit();
  }

  // Add a slice of columns to the sums, and its part of <D, S> to `state_dot`. Thread 0 computes the cursor
  // of three steps later while products are in flight.
  __device__ __forceinline__ void add_slice(int step, GradientSums& sums, float& state_dot) const {
    const Stage& stage = shared.stages[step % 2];
    const Cursor& at = shared.cursors[step % 4];
    Products::add_slice(stage, sums, at.slice == 0);
    if (thread == 0) {
      Cursor cursor = shared.cursors[(step + 2) % 4];
      cursor.advance(in, grid), shared.cursors[(step + 3) % 4] = cursor;
    }
    if (at.slice == 0) state_dot = 0;
    if (Shape::kParts == 1 || at.last_part(grid))
      this->store_values(stage.grad_y, at, shared.factors[at.heads_done % Shape::kHeads].beta);
#pragma unroll
    for (int i = 0; i < sizeof(stage.state) / 16 / kThreads; ++i) {
      const uint4 state = (&stage.state[0][0][thread])[i * kThreads], grad = (&stage.grad[0][0][thread])[i * kThreads];
      state_dot += this->dot(state.x, grad.x) + this->dot(state.y, grad.y) + this->dot(state.z, grad.z) +
                   this->dot(state.w, grad.w);
    }
    Products::wait(sums);
  }

  // Finish a value head after its slices, and add its sums to those of the head of q and k.
  __device__ __forceinline__ void finish_head(const Cursor& at, float scale, GradientSums& sums, float state_dot,
                                              Sums& dq, Sums& dk) const {
    const DeltaGradientFactors& factors = shared.factors[at.heads_done % Shape::kHeads];
    this->store_local(shared.p, shared.x, factors, sums.local, scale);
    if (half && p.grad_beta && this->part(at) == 0) this->store_betas(at, sums.local);
    this->scale_sums(sums, factors);
    const float2 written = row_dot(keys(at), sums.dk_col);
    state_dot = lanes_sum<32>(state_dot * factors.chunk_decay[0] + (lane % 4 == 0 ? written.x + written.y : 0.f));
    if (lane == 0) shared.after[thread / 32] = state_dot;
    Products::publish();
    __syncthreads();
    Products::add_local(keys(at), queries(at), shared.p, shared.x, sums);
    Products::wait(sums);
    store_dots(shared.q_dots, gate_terms(at, sums));
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float first = at.member == 0 ? 0.f : dq[0][n][i], second = at.member == 0 ? 0.f : dk[0][n][i];
        dq[0][n][i] = first + sums.dq[0][n][i], dk[0][n][i] = second + sums.dk_row[0][n][i] + sums.dk_col[0][n][i];
      }
    }
    __syncthreads();
    if (thread < 32 && p.grad_g) this->store_gates(at, shared.q_dots, shared.after);
  }

  // Finish dq and dk of a chunk.
  __device__ __forceinline__ void finish_chunk(const Cursor& at, Sums& dq, Sums& dk) const {
    const DeltaGradientFactors& factors = shared.factors[at.heads_done % Shape::kHeads];
    if (in.l2norm) {
      __syncthreads();  // all warps have read the sums of the value head
      store_dots(shared.q_dots, row_dot(queries(at), dq)), store_dots(shared.k_dots, row_dot(keys(at), dk));
      __syncthreads();
      const float2 total_q = total_over_keys(at, shared.q_dots, shared.total_q),
                   total_k = total_over_keys(at, shared.k_dots, shared.total_k);
      if (Shape::kParts > 1 && !at.last_part(grid)) {
        __syncthreads();  // all warps have read the sums of the previous parts
        if (half == 0 && lane % 4 == 0) {
          shared.total_q[row()] = total_q.x, shared.total_q[row() + 8] = total_q.y;
          shared.total_k[row()] = total_k.x, shared.total_k[row() + 8] = total_k.y;
        }
        this->save(at, 0, dq), this->save(at, 1, dk);
        return;
      }
      this->project(dq, queries(at), factors.q_factor, total_q);
      this->project(dk, keys(at), factors.k_factor, total_k);
      this->store(p.grad_q, at, dq, queries(at));
      this->store(p.grad_k, at, dk, keys(at));
      if constexpr (Shape::kParts > 1) {
        Cursor earlier(at);
#pragma unroll 1
        for (earlier.part = 0; earlier.part < at.part; ++earlier.part) {
          this->restore(earlier, 0, in.q, in.q_strides, factors.q_factor, total_q, dq);
          this->store(p.grad_q, earlier, dq, queries(at));
          this->restore(earlier, 1, in.k, in.k_strides, factors.k_factor, total_k, dk);
          this->store(p.grad_k, earlier, dk, keys(at));
        }
      }
      return;
    }
    this->store(p.grad_q, at, dq, queries(at));
    this->store(p.grad_k, at, dk, keys(at));
  }

 private:
  // Return <q, dq> + <k, row> - <k, col> of each row, over this warp's keys.
  __device__ __forceinline__ float2 gate_terms(const Cursor& at, const GradientSums& sums) const {
    float total[2] = {};
#pragma unroll
    for (int n = 0; n < Sums::kN; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 q = pair_of(queries(at), n, i), k = pair_of(keys(at), n, i);
        const auto &of_q = sums.dq[0][n], &read = sums.dk_row[0][n], &col = sums.dk_col[0][n];
        total[i] += q.x * of_q[2 * i] + q.y * of_q[2 * i + 1];
        total[i] += k.x * (read[2 * i] - col[2 * i]) + k.y * (read[2 * i + 1] - col[2 * i + 1]);
      }
    }
    return make_float2(quad_sum(total[0]), quad_sum(total[1]));
  }
  __device__ __forceinline__ float2 rows_of(const float (&of)[kDeltaChunk]) const {
    return make_float2(of[row()], of[row() + 8]);
  }
  // Return the total over the keys up to this part.
  __device__ __forceinline__ float2 total_over_keys(const Cursor& at, const float (&of)[2][kDeltaChunk],
                                                    const float (&earlier)[kDeltaChunk]) const {
    const float2 first = rows_of(of[0]), second = rows_of(of[1]);
    float2 sum = make_float2(first.x + second.x, first.y + second.y);
    if (Shape::kParts > 1 && at.part > 0) sum.x += earlier[row()], sum.y += earlier[row() + 8];
    return sum;
  }
  __device__ __forceinline__ void store_dots(float (&to)[2][kDeltaChunk], const float2& total) const {
    if (lane % 4 == 0) to[half][row()] = total.x, to[half][row() + 8] = total.y;
  }
};

template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    delta_gradients_kernel(const DeltaRuleBackwardParams p, int64_t chunks) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kCompiled = Shape::kWgmma;
#else
  constexpr bool kCompiled = !Shape::kWgmma;
#endif
  if constexpr (kCompiled) {
    extern __shared__ __align__(1024) unsigned char memory[];
    using Gradients = DeltaGradients<Shape>;
    auto& shared = *reinterpret_cast<typename Gradients::Shared*>(memory);
    static_assert(sizeof(shared) <= (Shape::kWgmma ? 227 : 163) * 1024, "fits the smem of 9.0 or of 8.0");
    wait_for_inputs();
    const DeltaRuleInputs& in = p.in;
    // Values that are equal in all threads are in smem, because sums need the registers.
    if (threadIdx.x == 0) {
      shared.workspace = DeltaBackwardWorkspace(in, Shape::kParts * Shape::kKeys, chunks, p.workspace);
      shared.grid = GradientGrid(in, chunks, shared.workspace.strips / Gradients::Stage::kStrips, Shape::kParts);
      GradientCursor cursor(in, shared.grid);
#pragma unroll 1
      for (int i = 0; i < 3; ++i, cursor.advance(in, shared.grid)) shared.cursors[i] = cursor;
    }
    // Zeros above the diagonal are never overwritten.
    for (int i = threadIdx.x; i < sizeof(shared.p) / 16; i += Shape::kThreads)
      (&shared.p[0][0])[i] = (&shared.x[0][0])[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    const GradientGrid& grid = shared.grid;
    const auto load = [&](int step) { Gradients(p, shared).load(shared.stages[step % 2], shared.cursors[step % 4]); };
    load(0), load(1);
    typename Gradients::GradientSums sums;
    typename Gradients::Sums dq, dk;
    float state_dot = 0;
    for (int step = 0;; ++step) {
      const GradientCursor& cursor_of_step = shared.cursors[step % 4];
      ptx::cp_async_wait<1>();
      Gradients::publish();
      __syncthreads();
      if (cursor_of_step.done(grid)) break;
      Gradients(p, shared).add_slice(step, sums, state_dot);
      __syncthreads();
      // With a single slice per value head and two stages of rows and factors, the copies of step + 2 would
      // overwrite rows and factors that finish_head() still reads.
      const bool loads_early = Shape::kHeads > 2 || grid.slices > 1;
      if (loads_early) load(step + 2);
      if (cursor_of_step.last_slice(grid)) {
        const Gradients gradients(p, shared);
        gradients.finish_head(cursor_of_step, static_cast<float>(in.scale.get()), sums, state_dot, dq, dk);
        if (cursor_of_step.last_member(grid)) gradients.finish_chunk(cursor_of_step, dq, dk);
        __syncthreads();
      }
      if (!loads_early) load(step + 2);
    }
  }
}

}  // namespace flashinfer::cuda
