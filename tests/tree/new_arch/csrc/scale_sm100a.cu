// Kernel of the scale family for 10.0a: a thread scales 32 bytes. The portable kernel serves unaligned
// tensors.
#include <cstdint>
#include <cstring>

#include <flashinfer/cuda/ptx/wide.cuh>
#include <flashinfer/cuda/scale.cuh>

#include "scale_config.h"

namespace flashinfer::cuda {

constexpr int kPieceBytes = 32, kPieceThreads = 256;

template <typename T, int kPower>
__global__ void __launch_bounds__(kPieceThreads) scale_pieces(ScaleParams p) {
  constexpr int kPiece = kPieceBytes / sizeof(T);
  const T* in = static_cast<const T*>(p.input);
  T* out = static_cast<T*>(p.output);
  const int64_t first = (int64_t{blockIdx.x} * kPieceThreads + threadIdx.x) * kPiece;
  wait_for_inputs();
  if (first + kPiece <= p.count) {
    uint32_t words[8];
    ptx::load_32_bytes(words, in + first);
    T x[kPiece];
    memcpy(x, words, kPieceBytes);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x[i] = scaled<T, kPower>(x[i], p.factor);
    memcpy(words, x, kPieceBytes);
    ptx::store_32_bytes(out + first, words);
  } else {
    for (int64_t i = first; i < p.count; ++i) out[i] = scaled<T, kPower>(in[i], p.factor);
  }
  launch_dependents();
}

template <typename T, int kPower>
void scale_by_pieces(const ScaleParams& p, const Launch& where) {
  constexpr int64_t kEach = kPieceBytes / sizeof(T) * kPieceThreads;
  if (reinterpret_cast<uintptr_t>(p.input) % kPieceBytes != 0 ||
      reinterpret_cast<uintptr_t>(p.output) % kPieceBytes != 0)
    return scale<T, kPower>(p, where);
  launch(scale_pieces<T, kPower>, dim3(static_cast<unsigned>((p.count + kEach - 1) / kEach)), dim3(kPieceThreads),
         where, p);
}

}  // namespace flashinfer::cuda

namespace flashinfer {

void scale(const ScaleParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, DISPATCH_power(params.power, POWER, cuda::scale_by_pieces<T, POWER>(params, where)))
}

}  // namespace flashinfer
