// Z = (I + L B)^-1 L of a chunk, by four warps.
//
// Diagonal blocks come from forward substitution in float32. Blocks below them come from tf32 products, with
// an exact identity:
//   Z_ij = X - Z_ii B_i X,  X = L_ij - sum over j <= m < i of L_im B_m Z_mj.
// smem has two matrices. `left` has the A operands: L, whose diagonal blocks become Z_ii. `right` has the B
// operands, beta times Z.
#pragma once

#include <flashinfer/cuda/delta_rule/chunk/chunk.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>

namespace flashinfer::cuda {

constexpr int kDeltaSolvePitch = kDeltaChunk + 8;  // 8 more floats per row avoid bank conflicts
using DeltaSolveMatrix = float[kDeltaChunk][kDeltaSolvePitch];

// Return 1 / sqrt(sum x^2 + 1e-6) of a row of a tile.
template <typename T, int kUnits>
__device__ __forceinline__ float delta_normaliser(const uint4 (&rows)[kDeltaChunk][kUnits], int row) {
  const uint32_t start = Swizzle<16 * kUnits>::row(ptx::shared_address(rows), row);
  float total = 0;
#pragma unroll 4
  for (int i = 0; i < kUnits; ++i) {
    const uint4 eight = ptx::load_shared_16(Swizzle<16 * kUnits>::chunk(start, i));
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

// Shared has tiles `k` and `q`, and per token `beta`, `k_factor` and `q_factor`. Matrices `left` and `right`
// share the memory of the tiles and overwrite them.
template <typename T, typename Shared>
struct DeltaSolve {
  static constexpr int kThreads = 128;
  using Matrix = DeltaSolveMatrix;

  Shared& shared;
  int thread, barrier;  // index of this thread among kThreads, and its named barrier
  int warp = thread / 32, lane = thread % 32;

  __device__ __forceinline__ DeltaSolve(Shared& memory, int number, int barrier_number)
      : shared(memory), thread(number), barrier(barrier_number) {}

  // Issue copies of the rows of k and q to smem.
  __device__ __forceinline__ void copy_rows(const DeltaRuleInputs& in, const DeltaChunk& chunk,
                                            int64_t value_head) const {
    constexpr int kBytes = sizeof(shared.k[0]);
    const int64_t head = static_cast<uint32_t>(value_head) / static_cast<uint32_t>(in.group());
    copy_tokens<T, kBytes, kThreads>(ptx::shared_address(shared.k), in.k, in.k_strides, chunk, head, 0, in.key_dim,
                                     thread);
    copy_tokens<T, kBytes, kThreads>(ptx::shared_address(shared.q), in.q, in.q_strides, chunk, head, 0, in.key_dim,
                                     thread);
    ptx::cp_async_commit();
  }
  // Compute the L2 factors of rows in smem.
  __device__ __forceinline__ void find_factors(bool l2norm) const {
    const int row = thread % kDeltaChunk;
    (thread < kDeltaChunk ? shared.k_factor : shared.q_factor)[row] =
        l2norm ? delta_normaliser<T>(thread < kDeltaChunk ? shared.k : shared.q, row) : 1.f;
  }

  __device__ __forceinline__ void sync() const { ptx::named_barrier<kThreads>(barrier); }

  // Compute Z from L.
  __device__ __forceinline__ void solve(DeltaTerms& to) const {
    const int j = 16 * warp;
    substitute(j);
    float x[2][4];
    load_accumulator(shared.left, j, j, x);
    store_operand(to.z[DeltaTerms::block(warp, warp)], x[0], x[1], -1.f);
    sync();
    for (int i = j + 16; i < kDeltaChunk; i += 16) {
      load_accumulator(shared.left, i, j, x);
      for (int m = j; m < i; m += 16) subtract(x, i, m, j);
      store_times_beta(i, j, x);
      __syncwarp();
      subtract(x, i, i, j);
      __syncwarp();
      store_times_beta(i, j, x);
      store_operand(to.z[DeltaTerms::block(i / 16, warp)], x[0], x[1], -1.f);
      __syncwarp();
    }
  }

  __device__ __forceinline__ static float2* as_float2(float* at) { return reinterpret_cast<float2*>(at); }

  // Accesses to a 16 x 16 block in accumulator layout. load_accumulator() loads it from a matrix,
  // store_times_beta() stores beta times it to `right`, and store_operand() stores it to gmem as 8 x 8
  // matrices.
  __device__ __forceinline__ void load_accumulator(Matrix& from, int row, int column, float (&x)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = *as_float2(&from[row + lane / 4 + 8 * half][column + 8 * n + 2 * (lane % 4)]);
        x[n][2 * half] = pair.x, x[n][2 * half + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ void store_times_beta(int row, int column, const float (&x)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = row + lane / 4 + 8 * half;
      const float by = shared.beta[at];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        *as_float2(&shared.right[at][column + 8 * n + 2 * (lane % 4)]) =
            make_float2(by * x[n][2 * half], by * x[n][2 * half + 1]);
    }
  }
  __device__ __forceinline__ static void store_operand(DeltaBlock16& to, const float (&left)[4],
                                                       const float (&right)[4], float sign) {
    const uint32_t words[4] = {pack<T>(sign * left[0], sign * left[1]), pack<T>(sign * right[0], sign * right[1]),
                               pack<T>(sign * left[2], sign * left[3]), pack<T>(sign * right[2], sign * right[3])};
    store_block(to, words);
  }

 private:
  // Solve a diagonal block by forward substitution. Lanes l and l + 16 both compute column l. Lanes 0-15
  // store Z, lanes 16-31 store beta times Z.
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

  // x -= left_im right_mj for the 16 x 16 blocks at these offsets: L_im B_m Z_mj for m < i, and Z_ii B_i X
  // for m = i. The k indices of a lane are adjacent instead of 4 apart, in both operands: the sum over k is
  // the same.
  __device__ __forceinline__ void subtract(float (&x)[2][4], int i, int m, int j) const {
    const int group = lane / 4, quad_lane = lane % 4;
#pragma unroll
    for (int k = m + 2 * quad_lane; k < m + 2 * quad_lane + 16; k += 8) {
      const float2 upper = *as_float2(&shared.left[i + group][k]), lower = *as_float2(&shared.left[i + group + 8][k]);
      const uint32_t left[4] = {ptx::to_tf32(-upper.x), ptx::to_tf32(-lower.x), ptx::to_tf32(-upper.y),
                                ptx::to_tf32(-lower.y)};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* right = &shared.right[k][j + 8 * n + group];
        ptx::mma_m16n8k8_tf32(x[n], left, ptx::to_tf32(right[0]), ptx::to_tf32(right[kDeltaSolvePitch]));
      }
    }
  }
};

}  // namespace flashinfer::cuda
