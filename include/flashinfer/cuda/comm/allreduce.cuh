// All-reduce on CUDA: selection of a kernel by the number of ranks and the alignment of rows.
#pragma once

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cuda/comm/one_shot.cuh>
#include <flashinfer/cuda/host/check.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda {

// Returns true if every part of every row begins at a multiple of 16 bytes.
inline bool is_aligned(const AllReduceParams& p) {
  uintptr_t bits = p.weight ? p.row_bytes : static_cast<uintptr_t>(p.rows * p.row_bytes);
  for (const void* one :
       {p.input, p.residual_in, p.weight, static_cast<const void*>(p.out), static_cast<const void*>(p.residual_out),
        static_cast<const void*>(p.norm_out), static_cast<const void*>(p.quant_out)})
    bits |= reinterpret_cast<uintptr_t>(one);
  return bits % kPartBytes == 0;
}

// Kernels for 2, 4 and 8 ranks are compiled for aligned rows. One kernel serves other numbers and other rows.
template <typename T>
void allreduce(const AllReduceParams& p, const Launch& where) {
  if (!is_aligned(p)) return one_shot<T, 0, false>(p, where);
  switch (p.group.ranks) {
    case 2: return one_shot<T, 2, true>(p, where);
    case 4: return one_shot<T, 4, true>(p, where);
    case 8: return one_shot<T, 8, true>(p, where);
    default: return one_shot<T, 0, true>(p, where);
  }
}

// Loads the kernels to the current device. A first launch may otherwise wait for running kernels, and those wait for
// peers.
template <typename T, int kRanks>
void load_kernels() {
  cudaFuncAttributes attributes{};
  for (auto* kernel : {one_shot_kernel<T, kRanks, 1, false, true>, one_shot_kernel<T, kRanks, 1, true, true>,
                       one_shot_kernel<T, 0, 1, false, false>, one_shot_kernel<T, 0, 1, true, false>,
                       one_shot_kernel<T, 0, static_cast<int>(2 * sizeof(T)), true, false>})
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}
template <typename T>
void load_kernels(int ranks) {
  switch (ranks) {
    case 2: return load_kernels<T, 2>();
    case 4: return load_kernels<T, 4>();
    case 8: return load_kernels<T, 8>();
    default: return load_kernels<T, 0>();
  }
}

}  // namespace flashinfer::cuda
