// First kernel of the chunk form: P, Z and the factors of every chunk and value head, independently.
// chunk.cuh has the equations. A warp has 16 rows.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/solve.cuh>
#include <flashinfer/cuda/delta_rule/columns.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>

namespace flashinfer::cuda {

template <int kKeys>
struct DeltaPrepareShared {
  using Matrix = DeltaSolveMatrix;

  union {
    struct {
      uint4 k[kDeltaChunk][kKeys / 8], q[kDeltaChunk][kKeys / 8];
    };
    struct {
      Matrix left, right;
    };
  };
  float log2_decay[kDeltaChunk];  // G / ln 2, for ex2
  float beta[kDeltaChunk], k_factor[kDeltaChunk], q_factor[kDeltaChunk];
};

template <typename T, int kKeys>
struct DeltaPrepare : DeltaSolve<T, DeltaPrepareShared<kKeys>> {
  static constexpr int kBytes = 2 * kKeys;
  using Shared = DeltaPrepareShared<kKeys>;
  using Base = DeltaSolve<T, Shared>;
  using Sums = Accumulator<16, kDeltaChunk>;
  using Base::store_operand, Base::kThreads, Base::lane, Base::shared, Base::sync, Base::thread, Base::as_float2,
      Base::warp;

  const DeltaRuleInputs& in;

  // For kThreads threads that share a named barrier.
  __device__ __forceinline__ DeltaPrepare(const DeltaRuleInputs& inputs, Shared& memory, int number, int barrier)
      : Base(memory, number, barrier), in(inputs) {}

  // Compute the terms of a chunk and value head.
  __device__ __forceinline__ void run(const DeltaChunk& chunk, int64_t value_head, float scale, DeltaTerms& to) const {
    load(chunk, value_head);
    correlate(scale, to);
    this->solve(to);
    store(scale, to);
  }

 private:
  __device__ __forceinline__ void load(const DeltaChunk& chunk, int64_t value_head) const {
    this->copy_rows(in, chunk, value_head);
    const int64_t number = (chunk.batch * in.num_tokens + chunk.first) * in.num_value_heads + value_head;
    if (warp == 0) {
      const float first = gate(number, 2 * lane, chunk.count), second = gate(number, 2 * lane + 1, chunk.count);
      float sum = first + second;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const float other = __shfl_up_sync(kAllLanes, sum, by);
        if (lane >= by) sum += other;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1);
      shared.log2_decay[2 * lane] = (lane ? before : 0.f) + first, shared.log2_decay[2 * lane + 1] = sum;
    } else if (warp < 3) {
      const int i = thread - 32;
      shared.beta[i] = i >= chunk.count ? 0.f
                       : in.beta        ? load_float<float>(in.beta, number + i * in.num_value_heads)
                                        : 1.f;
    }
    ptx::cp_async_wait<0>();
    sync();
    this->find_factors(in.l2norm);
    sync();
  }

  // Compute K K' and Q K'. P goes to gmem, L replaces q and k in smem.
  __device__ __forceinline__ void correlate(float scale, DeltaTerms& to) const {
    const SmemOperandA<kBytes> keys(ptx::shared_address(shared.k), 16 * warp);
    const SmemOperandA<kBytes> queries(ptx::shared_address(shared.q), 16 * warp);
    const SmemOperandB<kBytes> key_columns(ptx::shared_address(shared.k), 0);
    Sums l, p;
    l.clear(), p.clear();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t k[1][4], q[1][4];
      keys.load(k[0], 0, step), queries.load(q[0], 0, step);
#pragma unroll
      for (int pair = 0; pair < kDeltaChunk / 16; ++pair) {
        if (pair > warp) continue;
        uint32_t b[2][2];
        key_columns.load(b, pair, step);
        l.template add<T>(k, b, pair), p.template add<T>(q, b, pair);
      }
    }
    sync();
    const int upper = 16 * warp + lane / 4;
    const float row_decay[2] = {shared.log2_decay[upper], shared.log2_decay[upper + 8]};
    const float k_factors[2] = {shared.k_factor[upper], shared.k_factor[upper + 8]};
    const float q_factors[2] = {scale * shared.q_factor[upper], scale * shared.q_factor[upper + 8]};
#pragma unroll
    for (int n = 0; n < kDeltaChunk / 8; ++n) {
      if (n / 2 > warp) continue;
      const int column = 8 * n + 2 * (lane % 4);
      const float2 column_decay = *as_float2(&shared.log2_decay[column]),
                   column_factor = *as_float2(&shared.k_factor[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = upper + 8 * half;
        const float first = column > row ? 0.f : ptx::ex2_approx(row_decay[half] - column_decay.x) * column_factor.x;
        const float second =
            column + 1 > row ? 0.f : ptx::ex2_approx(row_decay[half] - column_decay.y) * column_factor.y;
        auto& p_tile = p[0][n];
        p_tile[2 * half] *= first * q_factors[half], p_tile[2 * half + 1] *= second * q_factors[half];
        const float* l_tile = &l[0][n][2 * half];
        *as_float2(&shared.left[row][column]) =
            make_float2(column < row ? l_tile[0] * (first * k_factors[half]) : 0.f,
                        column + 1 < row ? l_tile[1] * (second * k_factors[half]) : 0.f);
      }
    }
#pragma unroll
    for (int column = 0; column < kDeltaChunk / 16; ++column) {
      if (column > warp) continue;
      store_operand(to.p[DeltaTerms::block(warp, column)], p[0][2 * column], p[0][2 * column + 1], 1.f);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store(float scale, DeltaTerms& to) const {
    const int i = thread % kDeltaChunk;
    const float sum = shared.log2_decay[i], last = shared.log2_decay[kDeltaChunk - 1], decay = ptx::ex2_approx(sum);
    if (thread < kDeltaChunk) {
      to.k_decay[i] = decay * shared.k_factor[i], to.beta[i] = shared.beta[i];
      to.log2_decay[i] = sum, to.k_factor[i] = shared.k_factor[i], to.q_factor[i] = shared.q_factor[i];
      if (i == 0) to.chunk_decay[0] = ptx::ex2_approx(last);
    } else {
      to.q_decay[i] = scale * decay * shared.q_factor[i],
      to.update_decay[i] = ptx::ex2_approx(last - sum) * shared.k_factor[i];
    }
  }

  // Return g / ln 2 of a token, with g clamped to -50 or more. A large negative g would cancel the digits of
  // all later gates in the cumulative sum, and exp(-50) is negligible.
  __device__ __forceinline__ float gate(int64_t number, int i, int count) const {
    if (i >= count || !in.g) return 0.f;
    const float g = load_float<float>(in.g, number + i * in.num_value_heads);
    return (g < -50.f ? -50.f : g) * 1.4426950408889634f;
  }
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(DeltaPrepare<T, kKeys>::kThreads)
    delta_prepare_kernel(const DeltaRuleInputs in, DeltaTerms* terms) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<DeltaPrepareShared<kKeys>*>(memory);
  wait_for_inputs();
  const auto heads = static_cast<uint32_t>(in.num_value_heads);
  const int64_t value_head = blockIdx.x % heads, number = blockIdx.x / heads;
  const DeltaChunk chunk = find_chunk(in, number);
  if (chunk.count <= 0) return;
  DeltaPrepare<T, kKeys>(in, shared, threadIdx.x, 0)
      .run(chunk, value_head, static_cast<float>(in.scale.get()), terms[blockIdx.x]);
}

}  // namespace flashinfer::cuda
