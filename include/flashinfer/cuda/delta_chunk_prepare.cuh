// The first kernel of the delta rule over chunks: P, Z and the factors of each chunk and value head, apart from each
// other. A warp has 16 rows. Z's blocks on the diagonal come by substitution in float, those below them by products of
// tf32 from which the identity is kept:  Z_ij = X - Z_ii B_i X,  X = L_ij - sum over j <= m < i of L_im B_m Z_mj.
// Left operands are in one matrix, Z_ii in place of L_ii, and right ones, B Z, in another.
#pragma once

#include <flashinfer/cuda/delta_chunk.cuh>
#include <flashinfer/cuda/delta_columns.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda {

template <int kKeys>
struct DeltaPrepareShared {
  static constexpr int kPitch = kDeltaChunk + 8;  // no pairs of eight rows and columns meet the same bank
  using Matrix = float[kDeltaChunk][kPitch];

  union {
    struct {
      uint4 k[kDeltaChunk][kKeys / 8], q[kDeltaChunk][kKeys / 8];
    };
    struct {
      Matrix left, right;
    };
  };
  float sums[kDeltaChunk];  // G, of powers of two
  float beta[kDeltaChunk], k_factor[kDeltaChunk], q_factor[kDeltaChunk];
};

template <typename T, int kKeys>
struct DeltaPrepare {
  static constexpr int kThreads = 128, kBytes = 2 * kKeys;
  using Shared = DeltaPrepareShared<kKeys>;
  using Matrix = typename Shared::Matrix;
  using Sums = Accumulator<16, kDeltaChunk>;

  const DeltaRuleInputs& in;
  Shared& shared;
  int thread = threadIdx.x, barrier = 0;  // of kThreads, and that they meet at
  int warp = thread / 32, lane = thread % 32;

  // All of a chunk and head.
  __device__ __forceinline__ void run(const DeltaChunk& chunk, int64_t value_head, float scale, DeltaTerms& to) const {
    load(chunk, value_head);
    correlate(scale, to);
    solve(to);
    store(scale, to);
  }

 private:
  __device__ __forceinline__ void sync() const { ptx::named_barrier<kThreads>(barrier); }

  __device__ __forceinline__ void load(const DeltaChunk& chunk, int64_t value_head) const {
    const int64_t head = static_cast<uint32_t>(value_head) / static_cast<uint32_t>(in.group());
    copy_tokens<T, kBytes, kThreads>(ptx::shared_address(shared.k), in.k, in.k_strides, chunk, head, 0, in.key_dim,
                                     thread);
    copy_tokens<T, kBytes, kThreads>(ptx::shared_address(shared.q), in.q, in.q_strides, chunk, head, 0, in.key_dim,
                                     thread);
    ptx::cp_async_commit();
    const int64_t number = (chunk.batch * in.num_tokens + chunk.first) * in.num_value_heads + value_head;
    if (warp == 0) {
      const float first = gate(number, 2 * lane, chunk.count), second = gate(number, 2 * lane + 1, chunk.count);
      float sum = first + second;
#pragma unroll
      for (int by = 1; by < 32; by *= 2) {
        const float more = __shfl_up_sync(kAllLanes, sum, by);
        if (lane >= by) sum += more;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1);
      shared.sums[2 * lane] = (lane ? before : 0.f) + first, shared.sums[2 * lane + 1] = sum;
    } else if (warp < 3) {
      const int i = thread - 32;
      shared.beta[i] = i >= chunk.count ? 0.f
                       : in.beta        ? load_float<float>(in.beta, number + i * in.num_value_heads)
                                        : 1.f;
    }
    ptx::cp_async_wait<0>();
    sync();
    const int row = thread % kDeltaChunk;
    (thread < kDeltaChunk ? shared.k_factor : shared.q_factor)[row] =
        in.l2norm ? normaliser(thread < kDeltaChunk ? shared.k : shared.q, row) : 1.f;
    sync();
  }

  // Products of the rows, P as it leaves, and L in place of q and k.
  __device__ __forceinline__ void correlate(float scale, DeltaTerms& to) const {
    const LeftRows<kBytes> keys(ptx::shared_address(shared.k), 16 * warp);
    const LeftRows<kBytes> queries(ptx::shared_address(shared.q), 16 * warp);
    const RightRows<kBytes> others(ptx::shared_address(shared.k), 0);
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
        others.load(b, pair, step);
        l.template add<T>(k, b, pair), p.template add<T>(q, b, pair);
      }
    }
    sync();
    const int upper = 16 * warp + lane / 4;
    const float sums[2] = {shared.sums[upper], shared.sums[upper + 8]};
    const float of_k[2] = {shared.k_factor[upper], shared.k_factor[upper + 8]};
    const float of_q[2] = {scale * shared.q_factor[upper], scale * shared.q_factor[upper + 8]};
#pragma unroll
    for (int n = 0; n < kDeltaChunk / 8; ++n) {
      if (n / 2 > warp) continue;
      const int column = 8 * n + 2 * (lane % 4);
      const float2 others = *two(&shared.sums[column]), k = *two(&shared.k_factor[column]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = upper + 8 * half;
        const float first = column > row ? 0.f : ptx::ex2_approx(sums[half] - others.x) * k.x;
        const float second = column + 1 > row ? 0.f : ptx::ex2_approx(sums[half] - others.y) * k.y;
        auto& of = p[0][n];
        of[2 * half] *= first * of_q[half], of[2 * half + 1] *= second * of_q[half];
        const float* keys = &l[0][n][2 * half];
        *two(&shared.left[row][column]) = make_float2(column < row ? keys[0] * (first * of_k[half]) : 0.f,
                                                      column + 1 < row ? keys[1] * (second * of_k[half]) : 0.f);
      }
    }
#pragma unroll
    for (int column = 0; column < kDeltaChunk / 16; ++column) {
      if (column > warp) continue;
      give(to.p[DeltaTerms::block(warp, column)], p[0][2 * column], p[0][2 * column + 1], 1.f);
    }
    __syncwarp();
  }

  // Z of L.
  __device__ __forceinline__ void solve(DeltaTerms& to) const {
    const int j = 16 * warp;
    substitute(j);
    float x[2][4];
    load_block_of(shared.left, j, j, x);
    give(to.z[DeltaTerms::block(warp, warp)], x[0], x[1], -1.f);
    sync();
    for (int i = j + 16; i < kDeltaChunk; i += 16) {
      load_block_of(shared.left, i, j, x);
      for (int m = j; m < i; m += 16) subtract(x, i, m, j);
      store_weighted(i, j, x);
      __syncwarp();
      subtract(x, i, i, j);
      __syncwarp();
      store_weighted(i, j, x);
      give(to.z[DeltaTerms::block(i / 16, warp)], x[0], x[1], -1.f);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void store(float scale, DeltaTerms& to) const {
    const int i = thread % kDeltaChunk;
    const float sum = shared.sums[i], last = shared.sums[kDeltaChunk - 1], decay = ptx::ex2_approx(sum);
    if (thread < kDeltaChunk) {
      to.read[i] = decay * shared.k_factor[i], to.beta[i] = shared.beta[i];
      to.sums[i] = sum, to.k_factor[i] = shared.k_factor[i], to.q_factor[i] = shared.q_factor[i];
      if (i == 0) to.last[0] = ptx::ex2_approx(last);
    } else {
      to.out[i] = scale * decay * shared.q_factor[i], to.write[i] = ptx::ex2_approx(last - sum) * shared.k_factor[i];
    }
  }

  // The gate in powers of two. Sums of hugely negative numbers would lose the digits of those that follow; exp(-50) is
  // nothing.
  __device__ __forceinline__ float gate(int64_t number, int i, int count) const {
    if (i >= count || !in.g) return 0.f;
    const float g = load_float<float>(in.g, number + i * in.num_value_heads);
    return (g < -50.f ? -50.f : g) * 1.4426950408889634f;
  }

  __device__ __forceinline__ static float normaliser(const uint4 (&rows)[kDeltaChunk][kKeys / 8], int row) {
    const uint32_t start = Swizzle<kBytes>::row(ptx::shared_address(rows), row);
    float total = 0;
#pragma unroll 4
    for (int i = 0; i < kKeys / 8; ++i) {
      const uint4 eight = ptx::load_shared_16(Swizzle<kBytes>::chunk(start, i));
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (uint32_t pair : pairs) {
        float low, high;
        unpack<T>(pair, low, high);
        total += low * low + high * high;
      }
    }
    return rsqrtf(total + 1e-6f);
  }

  __device__ __forceinline__ static float2* two(float* at) { return reinterpret_cast<float2*>(at); }

  // A block on the diagonal, a column for each of 16 lanes, of which there are two: one keeps Z, one what it weighs.
  __device__ __forceinline__ void substitute(int start) const {
    const int column = start + lane % 16;
    float found[16], weighted[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float* row = &shared.left[start + r][start];
      float z = shared.left[start + r][column];
#pragma unroll
      for (int m = 0; m < r; m += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + m);
        const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (m + e < r) z -= factors[e] * weighted[m + e];
      }
      found[r] = z, weighted[r] = shared.beta[start + r] * z;
    }
    __syncwarp();
    Matrix& to = lane < 16 ? shared.left : shared.right;
#pragma unroll
    for (int r = 0; r < 16; ++r) to[start + r][column] = lane < 16 ? found[r] : weighted[r];
    __syncwarp();
  }

  // A block in the layout of sums: from a matrix, times beta to that of right operands, and as 8 x 8 matrices to where
  // it is wanted.
  __device__ __forceinline__ void load_block_of(Matrix& from, int row, int column, float (&x)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = *two(&from[row + lane / 4 + 8 * half][column + 8 * n + 2 * (lane % 4)]);
        x[n][2 * half] = pair.x, x[n][2 * half + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ void store_weighted(int row, int column, const float (&x)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + lane / 4 + 8 * half;
      const float by = shared.beta[at];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        *two(&shared.right[at][column + 8 * n + 2 * (lane % 4)]) =
            make_float2(by * x[n][2 * half], by * x[n][2 * half + 1]);
    }
  }
  __device__ __forceinline__ static void give(DeltaBlocks& to, const float (&left)[4], const float (&right)[4],
                                              float sign) {
    const uint32_t words[4] = {pack<T>(sign * left[0], sign * left[1]), pack<T>(sign * right[0], sign * right[1]),
                               pack<T>(sign * left[2], sign * left[3]), pack<T>(sign * right[2], sign * right[3])};
    store_block(to, words);
  }

  // x -= A_im B_m Z_mj of blocks. A lane has neighbouring columns of the left operand, and those rows of the right one.
  __device__ __forceinline__ void subtract(float (&x)[2][4], int i, int m, int j) const {
    const int group = lane / 4, one = lane % 4;
#pragma unroll
    for (int k = m + 2 * one; k < m + 2 * one + 16; k += 8) {
      const float2 upper = *two(&shared.left[i + group][k]), lower = *two(&shared.left[i + group + 8][k]);
      const uint32_t left[4] = {ptx::to_tf32(-upper.x), ptx::to_tf32(-lower.x), ptx::to_tf32(-upper.y),
                                ptx::to_tf32(-lower.y)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* right = &shared.right[k][j + 8 * n + group];
        ptx::mma_m16n8k8_tf32(x[n], left, ptx::to_tf32(right[0]), ptx::to_tf32(right[Shared::kPitch]));
      }
    }
  }
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(DeltaPrepare<T, kKeys>::kThreads)
    delta_prepare_kernel(const DeltaRuleInputs in, DeltaTerms* all) {
  __shared__ __align__(128) DeltaPrepareShared<kKeys> shared;
  wait_for_inputs();
  const auto heads = static_cast<uint32_t>(in.num_value_heads);
  const int64_t value_head = blockIdx.x % heads, number = blockIdx.x / heads;
  const DeltaChunk chunk = find_chunk(in, number);
  if (chunk.count <= 0) return;
  DeltaPrepare<T, kKeys>{in, shared}.run(chunk, value_head, static_cast<float>(in.scale.get()), all[blockIdx.x]);
}

}  // namespace flashinfer::cuda
