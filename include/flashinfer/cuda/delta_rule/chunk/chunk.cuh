// What the kernels of the delta rule over chunks of 64 tokens share: where chunks lie, and what one leaves for another.
//
// With i, j numbers of tokens in a chunk, G the sums of g from its start on, Gam_ij = exp(G_i - G_j), B = diag(beta):
//   L = strict lower(k_i k_j Gam_ij)    P = scale lower(q_i k_j Gam_ij)    Z = (I + L B)^-1 L
//   R = V - e^G K S    r = R - Z (B R)    u = B r    O = scale e^G Q S + P u    S = e^Gn S + K' e^(Gn-G) u
// Where q and k are normalised, their factors stand in L and P and beside e^G, and rows are what they were.
#pragma once

#include <cstdint>

#include <flashinfer/common/delta_rule.h>
#include <flashinfer/cuda/ptx/cp_async.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>

namespace flashinfer::cuda {

constexpr int kDeltaChunk = 64;

// The number of a sequence's first chunk. From the shapes alone it is known how many numbers there are; some of them no
// chunk has, where there are cu_seqlens.
FLASHINFER_HD int64_t first_chunk(const DeltaRuleInputs& in, int64_t n) {
  if (!in.cu_seqlens.data) return n * ((in.num_tokens + kDeltaChunk - 1) / kDeltaChunk);
  return sequence_of(in, n).begin / kDeltaChunk + n;
}
inline int64_t count_chunks(const DeltaRuleInputs& in) {
  if (!in.cu_seqlens.data) return first_chunk(in, in.num_sequences);
  return in.num_tokens / kDeltaChunk + in.num_sequences;
}

// Up to 64 tokens of a sequence.
struct DeltaChunk {
  int64_t batch, first;
  int count;  // not positive: none

  __device__ __forceinline__ DeltaChunk(const Sequence& tokens, int64_t number)
      : batch(tokens.batch), first(tokens.begin + number * kDeltaChunk) {
    const int64_t left = number < 0 ? 0 : tokens.end - first;
    count = static_cast<int>(left < kDeltaChunk ? left : kDeltaChunk);
  }
};

__device__ __forceinline__ DeltaChunk find_chunk(const DeltaRuleInputs& in, int64_t number) {
  int64_t low = 0, high = in.num_sequences;  // the last sequence whose first chunk is not behind `number`
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_chunk(in, middle) <= number ? low : high) = middle;
  }
  return {sequence_of(in, low), number - first_chunk(in, low)};
}

// Four matrices of 8 x 8, each with rows of 16 bytes behind each other: ldmatrix takes them by lane.
using DeltaBlocks = uint4[32];

// What of a chunk and a value head does not depend on the state. -Z and P are blocks of 16 x 16 on and below the
// diagonal, row by row, each with its upper two matrices before its lower ones.
struct DeltaMatrices {
  static constexpr int kBlocks = kDeltaChunk / 16 * (kDeltaChunk / 16 + 1) / 2;
  using Matrix = DeltaBlocks[kBlocks];

  Matrix z, p;

  static __host__ __device__ constexpr int block(int row, int column) { return row * (row + 1) / 2 + column; }
};
struct alignas(16) DeltaFactors {
  float read[kDeltaChunk];   // e^G, and k's factor
  float beta[kDeltaChunk];   // 0 behind the last token, as k and q are
  float out[kDeltaChunk];    // scale e^G, and q's factor
  float write[kDeltaChunk];  // e^(Gn - G), and k's factor
  float last[4];             // e^Gn, and nothing
};
struct DeltaGradientFactors : DeltaFactors {
  float sums[kDeltaChunk];  // G, of powers of two
  float k_factor[kDeltaChunk], q_factor[kDeltaChunk];
};
struct DeltaTerms : DeltaMatrices, DeltaGradientFactors {};
static_assert(sizeof(DeltaTerms) == sizeof(DeltaMatrices) + sizeof(DeltaGradientFactors), "parts behind each other");

// What a walk wants of them.
struct DeltaScanTerms : DeltaMatrices, DeltaFactors {};

// With a gate of each channel e^G is in the rows themselves, and of the factors are left those of k, q and the scale.
template <int kKeys>
struct DeltaChannelTerms : DeltaTerms {
  using Rows = uint4[kDeltaChunk][kKeys / 8];

  float decay[kKeys];               // e^Gn
  alignas(128) Rows k, q, written;  // e^G k, e^G q, e^(Gn - G) k; zeros behind the last token
};

// Bytes of a chunk's terms.
FLASHINFER_HD int64_t delta_term_bytes(const DeltaRuleInputs& in) {
  if (!in.gk) return sizeof(DeltaTerms);
  return in.key_dim <= 64 ? sizeof(DeltaChannelTerms<64>) : sizeof(DeltaChannelTerms<128>);
}

// A lane's pairs of a block's four matrices.
template <bool kTransposed>
__device__ __forceinline__ void load_block(uint32_t (&r)[4], uint32_t start) {
  const uint32_t at = start + threadIdx.x % 32 * 16;
  if constexpr (kTransposed) {
    ptx::ldmatrix_x4_trans(r, at);
  } else {
    ptx::ldmatrix_x4(r, at);
  }
}
// In memory of any kind, 32 words after each other.
__device__ __forceinline__ void store_block(void* start, const uint32_t (&r)[4]) {
  uint32_t* to = static_cast<uint32_t*>(start) + threadIdx.x % 32;
  to[0] = r[0], to[32] = r[1], to[64] = r[2], to[96] = r[3];
}

// Starts copies of a chunk's rows of q, k or v into a tile of 64 rows of kBytes, by kThreads threads: zeros behind the
// last token and behind `size` elements. kLineRows is that of Swizzle.
template <typename T, int kBytes, int kThreads, int kLineRows = 0>
__device__ __forceinline__ void copy_tokens(uint32_t tile, const void* rows, const TokenStrides& strides,
                                            const DeltaChunk& chunk, int64_t head, int64_t from, int64_t size,
                                            int thread) {
  using Rows = Swizzle<kBytes, kLineRows>;
  constexpr int kPieces = kBytes / 16;
  static_assert(kDeltaChunk * kPieces % kThreads == 0 && kThreads % kPieces == 0, "each thread copies one column");
  constexpr int kStep = kThreads / kPieces;  // rows
  const int column = thread % kPieces;
  const bool inside = from + 8 * column < size;
  int row = thread / kPieces;
  const T* at = static_cast<const T*>(rows) + strides.at(chunk.batch, chunk.first + row, head) + from + 8 * column;
#pragma unroll
  for (int i = 0; i < kDeltaChunk / kStep; ++i, row += kStep, at += kStep * strides.token)
    ptx::cp_async_16(Rows::chunk(Rows::row(tile, row), column), at, inside && row < chunk.count);
}

// Two tiles of sums side by side as a left operand.
template <typename T>
__device__ __forceinline__ void pack_operand_a(uint32_t (&a)[4], const float (&first)[4], const float (&second)[4]) {
  a[0] = pack<T>(first[0], first[1]), a[1] = pack<T>(first[2], first[3]);
  a[2] = pack<T>(second[0], second[1]), a[3] = pack<T>(second[2], second[3]);
}
// The same of dy, which is not multiplied by beta yet: too large for half_t, beta = 0 would make it NaN.
template <typename T>
__device__ __forceinline__ void pack_finite_operand_a(uint32_t (&a)[4], const float (&first)[4],
                                                      const float (&second)[4]) {
  a[0] = pack_finite<T>(first[0], first[1]), a[1] = pack_finite<T>(first[2], first[3]);
  a[2] = pack_finite<T>(second[0], second[1]), a[3] = pack_finite<T>(second[2], second[3]);
}

}  // namespace flashinfer::cuda
