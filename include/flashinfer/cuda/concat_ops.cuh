// Concatenation of MLA's keys on CUDA. A thread moves 16 bytes of a key row at a time. Threads of a CTA are
// adjacent in the rows of one or several tokens, so that stores fill whole lines. Each head rereads the rope
// row, which hits the L1 cache after the first.
#pragma once

#include <algorithm>
#include <cstdint>

#include <flashinfer/common/concat_ops.h>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda {

constexpr int kConcatThreads = 256;
constexpr int kConcatPieces = 4;  // accesses of a thread in flight

// One access moves a `Piece`: 16 bytes, or less for other alignments.
template <typename Piece>
__global__ void __launch_bounds__(kConcatThreads) concat_mla_k_kernel(const ConcatMlaParams p) {
  wait_for_inputs();
  launch_dependents();
  const auto nope = static_cast<uint32_t>(p.nope_bytes / sizeof(Piece));
  const auto row = static_cast<uint32_t>((p.nope_bytes + p.rope_bytes) / sizeof(Piece));
  const auto heads = static_cast<uint32_t>(p.heads);
  const uint32_t count = heads * row;  // pieces of a token
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const char* const from_nope = p.nope + token * p.nope_token_stride;
    const char* const from_rope = p.rope + token * p.rope_token_stride;
    char* const to = p.k + token * p.k_token_stride;
    const uint32_t step = gridDim.y * kConcatThreads;
    for (uint32_t first = blockIdx.y * kConcatThreads + threadIdx.x; first < count; first += step * kConcatPieces) {
      Piece pieces[kConcatPieces];
      int64_t places[kConcatPieces];
#pragma unroll
      for (int i = 0; i < kConcatPieces; ++i) {
        const uint32_t at = first + i * step;
        if (at >= count) break;
        const uint32_t head = at / row, piece = at % row;
        const char* from = piece < nope ? from_nope + head * p.nope_head_stride + piece * int64_t{sizeof(Piece)}
                                        : from_rope + (piece - nope) * int64_t{sizeof(Piece)};
        pieces[i] = *reinterpret_cast<const Piece*>(from);
        places[i] = head * p.k_head_stride + piece * int64_t{sizeof(Piece)};
      }
#pragma unroll
      for (int i = 0; i < kConcatPieces; ++i) {
        if (first + i * step < count) *reinterpret_cast<Piece*>(to + places[i]) = pieces[i];
      }
    }
  }
}

// Return the bytes of one access. All starts and strides are multiples of them.
inline int concat_access(const ConcatMlaParams& p) {
  uint64_t all = 16;
  for (const void* pointer :
       {static_cast<const void*>(p.k), static_cast<const void*>(p.nope), static_cast<const void*>(p.rope)})
    all |= reinterpret_cast<uintptr_t>(pointer);
  for (const int64_t bytes : {p.k_token_stride, p.k_head_stride, p.nope_token_stride, p.nope_head_stride,
                              p.rope_token_stride, p.nope_bytes, p.rope_bytes})
    all |= static_cast<uint64_t>(bytes);
  return static_cast<int>(all & -all);
}

inline void concat_mla_k(const ConcatMlaParams& p, const Launch& where) {
  const int bytes = concat_access(p);
  const auto kernel = bytes >= 16  ? concat_mla_k_kernel<uint4>
                      : bytes >= 8 ? concat_mla_k_kernel<uint2>
                      : bytes >= 4 ? concat_mla_k_kernel<uint32_t>
                      : bytes >= 2 ? concat_mla_k_kernel<uint16_t>
                                   : concat_mla_k_kernel<uint8_t>;
  const int64_t pieces = p.heads * ((p.nope_bytes + p.rope_bytes) / std::min(bytes, 16));
  const int64_t a_block = int64_t{kConcatThreads} * kConcatPieces;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(p.tokens, 1 << 20)),
                  static_cast<unsigned>(std::min<int64_t>((pieces + a_block - 1) / a_block, 65535)));
  launch(kernel, grid, kConcatThreads, where, p);
}

}  // namespace flashinfer::cuda
