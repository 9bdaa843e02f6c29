// Chunk form of the gated delta rule: the numbering of chunks of 64 tokens, and the terms that kernels
// exchange.
//
// The WY form of DeltaNet (Yang et al. 2024, arXiv 2406.06484) with the decay of Gated DeltaNet (Yang et al.
// 2024, arXiv 2412.06464), written with one matrix Z: the papers' T = (I + B L)^-1 B is B (I - Z B), and W
// and U are not formed. i and j are tokens of a chunk, n is its last one. G is the inclusive sum of g within
// the chunk, Gam_ij = exp(G_i - G_j), B = diag(beta). Q, K and V have a row per token, S is the state, r are
// residuals, u are updates of the state. ' is the transpose:
//   L = strict lower(k_i k_j Gam_ij)    P = scale lower(q_i k_j Gam_ij)    Z = (I + L B)^-1 L
//   R = V - e^G K S    r = R - Z (B R)    u = B r    O = scale e^G Q S + P u    S = e^Gn S + K' e^(Gn-G) u
// If q and k are normalised, the kernels multiply L, P and the stored decays by the reciprocal L2 norms of
// their rows. The rows of q and k are not rewritten.
#pragma once

#include <cstdint>

#include <flashinfer/common/delta_rule.h>
#include <flashinfer/common/search.h>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>

namespace flashinfer::cuda {

constexpr int kDeltaChunk = 64;

// Return the index of a sequence's first chunk, computed from shapes and cu_seqlens without a prefix sum.
// With cu_seqlens, some indices belong to no chunk, and count_chunks() is an upper bound.
FLASHINFER_HD int64_t first_chunk(const DeltaRuleInputs& in, int64_t n) {
  if (!in.cu_seqlens.data) return n * ((in.num_tokens + kDeltaChunk - 1) / kDeltaChunk);
  return sequence_of(in, n).begin / kDeltaChunk + n;
}
inline int64_t count_chunks(const DeltaRuleInputs& in) {
  if (!in.cu_seqlens.data) return first_chunk(in, in.num_sequences);
  return in.num_tokens / kDeltaChunk + in.num_sequences;
}

// A chunk: at most 64 tokens of a sequence.
struct DeltaChunk {
  int64_t batch, first;
  int count;  // 0 or negative: no tokens

  __device__ __forceinline__ DeltaChunk(const Sequence& tokens, int64_t number)
      : batch(tokens.batch), first(tokens.begin + number * kDeltaChunk) {
    const int64_t left = number < 0 ? 0 : tokens.end - first;
    count = static_cast<int>(left < kDeltaChunk ? left : kDeltaChunk);
  }
};

__device__ __forceinline__ DeltaChunk find_chunk(const DeltaRuleInputs& in, int64_t number) {
  const int64_t sequence =
      last_at_or_before(int64_t{0}, in.num_sequences, number, [&](int64_t s) { return first_chunk(in, s); });
  return {sequence_of(in, sequence), number - first_chunk(in, sequence)};
}

// A 16 x 16 block: four 8 x 8 matrices with contiguous rows of 16 bytes, in the order of ldmatrix.
using DeltaBlock16 = uint4[32];

// Terms of a chunk and value head that do not depend on the state. `z` holds -Z and `p` holds P: the 16 x 16
// blocks on and below the diagonal, row by row. A block has its four 8 x 8 matrices row by row.
// load_block_a() swaps two for mma.
struct DeltaMatrices {
  static constexpr int kBlocks = kDeltaChunk / 16 * (kDeltaChunk / 16 + 1) / 2;
  using Matrix = DeltaBlock16[kBlocks];

  Matrix z, p;

  static __host__ __device__ constexpr int block(int row, int column) { return row * (row + 1) / 2 + column; }
};
struct alignas(16) DeltaFactors {
  float k_decay[kDeltaChunk];       // e^G, times k's factor
  float beta[kDeltaChunk];          // 0 after the last token, like k and q
  float q_decay[kDeltaChunk];       // scale e^G, times q's factor
  float update_decay[kDeltaChunk];  // e^(Gn - G), times k's factor
  float chunk_decay[4];             // e^Gn, then padding
};
struct DeltaGradientFactors : DeltaFactors {
  float log2_decay[kDeltaChunk];  // G / ln 2, for ex2
  float k_factor[kDeltaChunk], q_factor[kDeltaChunk];
};
struct DeltaTerms : DeltaMatrices, DeltaGradientFactors {};
static_assert(sizeof(DeltaTerms) == sizeof(DeltaMatrices) + sizeof(DeltaGradientFactors),
              "no padding between the parts");

// Terms that a scan loads.
struct DeltaScanTerms : DeltaMatrices, DeltaFactors {};

// Terms with a decay per channel. The rows of k and q include e^G, so k_decay is only the L2 factor of k, and
// q_decay that of q times scale.
template <int kKeys>
struct DeltaChannelTerms : DeltaTerms {
  using Rows = uint4[kDeltaChunk][kKeys / 8];

  float decay[kKeys];              // e^Gn
  alignas(128) Rows k, q, update;  // e^G k, e^G q, e^(Gn - G) k; zeros after the last token
};

// Return the size of a chunk's terms in bytes.
FLASHINFER_HD int64_t delta_term_bytes(const DeltaRuleInputs& in) {
  if (!in.gk) return sizeof(DeltaTerms);
  return in.key_dim <= 64 ? sizeof(DeltaChannelTerms<64>) : sizeof(DeltaChannelTerms<128>);
}

// Load a block by ldmatrix: r[i] is the lane's pair of its 8 x 8 matrix i.
template <bool kTransposed>
__device__ __forceinline__ void load_block(uint32_t (&r)[4], uint32_t start) {
  const uint32_t at = start + threadIdx.x % 32 * 16;
  if constexpr (kTransposed) {
    ptx::ldmatrix_x4_trans(r, at);
  } else {
    ptx::ldmatrix_x4(r, at);
  }
}
// Load a block as an A operand, in the register order of mma.m16n8k16.
template <bool kTransposed>
__device__ __forceinline__ void load_block_a(uint32_t (&a)[4], uint32_t start) {
  uint32_t r[4];
  load_block<kTransposed>(r, start);
  a[0] = r[0], a[1] = r[2], a[2] = r[1], a[3] = r[3];
}
// Store a block to smem or gmem. A warp writes 32 contiguous words at a time.
__device__ __forceinline__ void store_block(void* start, const uint32_t (&r)[4]) {
  uint32_t* to = static_cast<uint32_t*>(start) + threadIdx.x % 32;
  to[0] = r[0], to[32] = r[1], to[64] = r[2], to[96] = r[3];
}

// Issue copies of a chunk's rows of q, k or v into a tile of 64 rows of kBytes, by kThreads threads. Rows
// after the last token and elements from `size` on become zeros. kLineRows is the parameter of Swizzle.
template <typename T, int kBytes, int kThreads, int kLineRows = 0>
__device__ __forceinline__ void copy_tokens(uint32_t tile, const void* rows, const TokenStrides& strides,
                                            const DeltaChunk& chunk, int64_t head, int64_t from, int64_t size,
                                            int thread) {
  using Rows = Swizzle<kBytes, kLineRows>;
  constexpr int kUnits = kBytes / 16;
  static_assert(kDeltaChunk * kUnits % kThreads == 0 && kThreads % kUnits == 0, "a thread copies one column of units");
  constexpr int kStep = kThreads / kUnits;  // rows
  const int column = thread % kUnits;
  const bool inside = from + 8 * column < size;
  int row = thread / kUnits;
  const T* at = static_cast<const T*>(rows) + strides.at(chunk.batch, chunk.first + row, head) + from + 8 * column;
#pragma unroll
  for (int i = 0; i < kDeltaChunk / kStep; ++i, row += kStep, at += kStep * strides.token)
    ptx::cp_async_16(Rows::chunk(Rows::row(tile, row), column), at, inside && row < chunk.count);
}

// Conversions between an A operand and a vector of 16 bytes.
__device__ __forceinline__ uint4 as_vector(const uint32_t (&a)[4]) { return make_uint4(a[0], a[1], a[2], a[3]); }
__device__ __forceinline__ void from_vector(uint32_t (&a)[4], const uint4& vector) {
  a[0] = vector.x, a[1] = vector.y, a[2] = vector.z, a[3] = vector.w;
}

// Pack two adjacent accumulator tiles as an A operand.
template <typename T>
__device__ __forceinline__ void pack_operand_a(uint32_t (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = pack<T>(first[0], first[1]), a[1] = pack<T>(first[2], first[3]);
  a[2] = pack<T>(second[0], second[1]), a[3] = pack<T>(second[2], second[3]);
}
// Pack dy, the gradient before its product with B, as an A operand (backward/scan.cuh). In half_t, dy may
// overflow to infinity, and infinity times beta = 0 is NaN, so dy is clamped to finite values.
template <typename T>
__device__ __forceinline__ void pack_finite_operand_a(uint32_t (&a)[4], const float (&first)[4],
                                                      const float (&second)[4]) {
  a[0] = pack_finite<T>(first[0], first[1]), a[1] = pack_finite<T>(first[2], first[3]);
  a[2] = pack_finite<T>(second[0], second[1]), a[3] = pack_finite<T>(second[2], second[3]);
}

}  // namespace flashinfer::cuda
