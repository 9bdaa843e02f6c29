// Norms for 10.0a: RMSNorm reads rows in pieces of 32 bytes. The portable kernels serve every other call.
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include <flashinfer/cuda/norm.cuh>
#include <flashinfer/cuda/ptx/wide.cuh>

#include "norm_config.h"

namespace flashinfer::cuda {

constexpr int kPieceBytes = 32, kPieces = 4, kWideThreads = 256;

// A CTA holds a row in registers between the sum and the result.
template <typename T>
__global__ void __launch_bounds__(kWideThreads) rms_norm_wide_kernel(const RmsNormParams p) {
  constexpr int kN = kPieceBytes / sizeof(T);
  __shared__ __align__(16) float partial[32];
  const T* in = static_cast<const T*>(p.input) + p.input_rows.offset(blockIdx.x);
  T* out = static_cast<T*>(p.output) + p.output_rows.offset(blockIdx.x);
  const T* weight = static_cast<const T*>(p.weight);
  const int count = static_cast<int>(p.hidden_size / kN);
  wait_for_inputs();
  launch_dependents();
  uint32_t words[kPieces][8];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * kWideThreads;
    if (piece >= count) continue;
    ptx::load_32_bytes(words[i], in + piece * kN);
    T x[kN];
    memcpy(x, words[i], kPieceBytes);
#pragma unroll
    for (int j = 0; j < kN; ++j) squares += to_float(x[j]) * to_float(x[j]);
  }
  const ScaleOf<T> scale = inverse_root<T>(row_sum(squares, partial), p.hidden_size, p.eps);
  const RmsNormOutput<T> output(p);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = threadIdx.x + i * kWideThreads;
    if (piece >= count) continue;
    uint32_t of_weight[8];
    ptx::load_32_bytes(of_weight, weight + piece * kN);
    T x[kN], w[kN];
    memcpy(x, words[i], kPieceBytes), memcpy(w, of_weight, kPieceBytes);
    float values[kN], weights[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) values[j] = to_float(x[j]), weights[j] = to_float(w[j]);
    const Vec<T, kN> result = output(values, scale, weights);
    memcpy(words[i], &result, kPieceBytes);
    ptx::store_32_bytes(out + piece * kN, words[i]);
  }
}

// Return true if rows and weights consist of aligned pieces and a row fits into registers.
template <typename T>
bool has_wide_rows(const RmsNormParams& p) {
  constexpr int64_t kN = kPieceBytes / sizeof(T);
  if (p.residual || p.hidden_size % kN != 0 || p.hidden_size > kN * kPieces * kWideThreads) return false;
  for (const void* start : {p.input, p.weight, static_cast<const void*>(p.output)})
    if (reinterpret_cast<uintptr_t>(start) % kPieceBytes != 0) return false;
  for (const Rows* rows : {&p.input_rows, &p.output_rows})
    if (rows->inner_stride % kN != 0 || rows->middle_stride % kN != 0 || rows->outer_stride % kN != 0) return false;
  return true;
}

template <typename T>
void rms_norm_by_pieces(const RmsNormParams& p, const Launch& where) {
  if (!has_wide_rows<T>(p)) return rms_norm<T>(p, where);
  launch(rms_norm_wide_kernel<T>, dim3(static_cast<unsigned>(p.num_rows)), dim3(kWideThreads), where, p);
}

}  // namespace flashinfer::cuda

namespace flashinfer {

void rms_norm(const RmsNormParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::rms_norm_by_pieces<T>(params, where))
}

void layer_norm(const LayerNormParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::layer_norm<T>(params, where))
}

}  // namespace flashinfer
