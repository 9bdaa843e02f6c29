// The first kernel of the delta rule over chunks: P, Z and the factors of each chunk and value head, apart from each
// other. A warp has 16 rows. Z's blocks on the diagonal come by substitution in float, those below them by products of
// tf32 from which the identity is kept:  Z_ij = X - Z_ii B_i X,  X = L_ij - sum over j <= m < i of L_im B_m Z_mj.
#pragma once

#include <flashinfer/cuda/delta_chunk.cuh>
#include <flashinfer/cuda/delta_columns.cuh>
#include <flashinfer/cuda/ptx/approx.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda {

template <int kKeys>
struct DeltaPrepareShared {
  static constexpr int kPitch = kDeltaChunk + 4;  // no two lanes of a left operand meet the same bank
  using Matrix = float[kDeltaChunk][kPitch];

  union {
    struct {
      uint4 k[kDeltaChunk][kKeys / 8], q[kDeltaChunk][kKeys / 8];
    };
    struct {
      Matrix l, z;
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
    solve();
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
#pragma unroll
    for (int n = 0; n < kDeltaChunk / 8; ++n) {
      if (n / 2 > warp) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = upper + i / 2 * 8, column = 8 * n + 2 * (lane % 4) + i % 2;
        const float by =
            column > row ? 0.f : ptx::ex2_approx(shared.sums[row] - shared.sums[column]) * shared.k_factor[column];
        p[0][n][i] *= by * scale * shared.q_factor[row];
        shared.l[row][column] = column < row ? l[0][n][i] * (by * shared.k_factor[row]) : 0.f;
      }
    }
#pragma unroll
    for (int column = 0; column < kDeltaChunk / 16; ++column) {
      if (column > warp) continue;
      const auto& left = p[0][2 * column];
      const auto& right = p[0][2 * column + 1];
      const uint32_t words[4] = {pack<T>(left[0], left[1]), pack<T>(right[0], right[1]), pack<T>(left[2], left[3]),
                                 pack<T>(right[2], right[3])};
      store_block(to.p[DeltaTerms::block(warp, column)], words);
    }
    __syncwarp();
  }

  // Z of L.
  __device__ __forceinline__ void solve() const {
    substitute(16 * warp);
    sync();
    const int j = 16 * warp;
    for (int i = j + 16; i < kDeltaChunk; i += 16) {
      float x[2][4];
      for_elements(i, j, [&](int n, int e, int row, int column) { x[n][e] = shared.l[row][column]; });
      for (int m = j; m < i; m += 16) subtract(x, shared.l, i, m, j);
      for_elements(i, j, [&](int n, int e, int row, int column) { shared.z[row][column] = x[n][e]; });
      __syncwarp();
      subtract(x, shared.z, i, i, j);
      __syncwarp();
      for_elements(i, j, [&](int n, int e, int row, int column) { shared.z[row][column] = x[n][e]; });
      __syncwarp();
    }
    sync();
  }

  __device__ __forceinline__ void store(float scale, DeltaTerms& to) const {
    for (int block = warp; block < DeltaTerms::kBlocks; block += kThreads / 32) {
      const int m = (block >= 1) + (block >= 3) + (block >= 6), row = 16 * m + lane / 4;
      const int column = 16 * (block - DeltaTerms::block(m, 0)) + 2 * (lane % 4);
      const auto two = [&](int below, int right) {
        const float* z = &shared.z[row + below][column + right];
        return pack<T>(-z[0], -z[1]);
      };
      const uint32_t words[4] = {two(0, 0), two(0, 8), two(8, 0), two(8, 8)};
      store_block(to.z[block], words);
    }
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

  // A block on the diagonal, a column for each of 16 lanes.
  __device__ __forceinline__ void substitute(int start) const {
    const int column = start + lane % 16;
    float weighted[16];  // beta z
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float* row = &shared.l[start + r][start];
      float z = shared.l[start + r][column];
#pragma unroll
      for (int m = 0; m < r; m += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + m);
        const float factors[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (m + e < r) z -= factors[e] * weighted[m + e];
      }
      weighted[r] = shared.beta[start + r] * z;
      if (lane < 16) shared.z[start + r][column] = z;
    }
  }

  // Calls body(tile, element, row, column) for a lane's elements of a block in the layout of sums.
  template <typename Body>
  __device__ __forceinline__ void for_elements(int row, int column, const Body& body) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(n, e, row + lane / 4 + e / 2 * 8, column + 8 * n + 2 * (lane % 4) + e % 2);
    }
  }

  // x -= A_im B_m Z_mj of blocks.
  __device__ __forceinline__ void subtract(float (&x)[2][4], const Matrix& a, int i, int m, int j) const {
    const int group = lane / 4, one = lane % 4;
#pragma unroll
    for (int k = m; k < m + 16; k += 8) {
      uint32_t left[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) left[e] = ptx::to_tf32(-a[i + group + e % 2 * 8][k + one + e / 2 * 4]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t right[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = k + one + 4 * e;
          right[e] = ptx::to_tf32(shared.beta[row] * shared.z[row][j + 8 * n + group]);
        }
        ptx::mma_m16n8k8_tf32(x[n], left, right[0], right[1]);
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
