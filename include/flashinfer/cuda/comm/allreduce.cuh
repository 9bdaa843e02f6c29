// Collectives on CUDA: selection of a kernel by the number of ranks and the alignment of rows.
#pragma once

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cuda/comm/allreduce_kernel.cuh>
#include <flashinfer/cuda/comm/shares_kernel.cuh>
#include <flashinfer/cuda/host/check.cuh>
#include <flashinfer/cuda/host/launch.cuh>

namespace flashinfer::cuda {

// Return true if all pointers are multiples of 16 bytes and all parts are whole: those of a row with the
// norm, otherwise those of all rows, concatenated.
inline bool is_aligned(const AllReduceParams& p) {
  uintptr_t bits = p.weight ? p.row_bytes : static_cast<uintptr_t>(p.rows * p.row_bytes);
  for (const void* one :
       {p.input, p.residual_in, p.weight, static_cast<const void*>(p.out), static_cast<const void*>(p.residual_out),
        static_cast<const void*>(p.norm_out), static_cast<const void*>(p.quant_out)})
    bits |= reinterpret_cast<uintptr_t>(one);
  return bits % kPartBytes == 0;
}

// Choose the kernel. For aligned rows, 2 (only in one shot), 4 and 8 ranks have their own, and other numbers
// share one. Unaligned rows have one for any number.
template <typename T, bool kTwoShots>
void allreduce_in(const AllReduceParams& p, const Launch& where) {
  if (!is_aligned(p)) return launch_allreduce<T, 0, false, kTwoShots>(p, where);
  switch (p.group.ranks) {
    case 2: return launch_allreduce<T, kTwoShots ? 0 : 2, true, kTwoShots>(p, where);
    case 4: return launch_allreduce<T, 4, true, kTwoShots>(p, where);
    case 8: return launch_allreduce<T, 8, true, kTwoShots>(p, where);
    default: return launch_allreduce<T, 0, true, kTwoShots>(p, where);
  }
}
template <typename T>
void allreduce(const AllReduceParams& p, const Launch& where) {
  return p.two_shots ? allreduce_in<T, true>(p, where) : allreduce_in<T, false>(p, where);
}

template <typename T>
void reduce_scatter(const AllReduceParams& p, const Launch& where) {
  run_shares<T, false>(p, where, is_aligned(p));
}
template <typename T>
void all_gather(const AllReduceParams& p, const Launch& where) {
  run_shares<T, true>(p, where, is_aligned(p));
}

// Load the kernels to the current device. A first launch may otherwise wait for running kernels, and those
// wait for peers.
template <typename T, int kRanks, bool kTwoShots>
void load_kernels() {
  constexpr int kVecs = static_cast<int>(2 * sizeof(T));
  cudaFuncAttributes attributes{};
  for (auto* kernel :
       {allreduce_kernel<T, kRanks, 1, false, true, kTwoShots>, allreduce_kernel<T, kRanks, 1, true, true, kTwoShots>,
        allreduce_kernel<T, 0, 1, false, false, kTwoShots>, allreduce_kernel<T, 0, 1, true, false, kTwoShots>,
        allreduce_kernel<T, 0, kVecs, true, false, kTwoShots>})
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}
template <typename T, int kRanks>
void load_shares_kernels() {
  cudaFuncAttributes attributes{};
  for (auto* kernel : {shares_kernel<T, kRanks, false, true>, shares_kernel<T, kRanks, true, true>,
                       shares_kernel<T, 0, false, false>, shares_kernel<T, 0, true, false>})
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}
template <typename T>
void load_kernels(int ranks) {
  switch (ranks) {
    case 2: return load_kernels<T, 2, false>(), load_kernels<T, 0, true>(), load_shares_kernels<T, 2>();
    case 4: return load_kernels<T, 4, false>(), load_kernels<T, 4, true>(), load_shares_kernels<T, 4>();
    case 8: return load_kernels<T, 8, false>(), load_kernels<T, 8, true>(), load_shares_kernels<T, 8>();
    default: return load_kernels<T, 0, false>(), load_kernels<T, 0, true>(), load_shares_kernels<T, 0>();
  }
}

}  // namespace flashinfer::cuda
