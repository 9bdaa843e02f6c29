// The Hopper kernels of multi-head latent attention by themselves, for test_mla_kernels.py.
#include <flashinfer/cuda/mla/sm90.cuh>

template void flashinfer::cuda::sm90::mla<flashinfer::bfloat16_t>(const flashinfer::MlaParams&,
                                                                  const flashinfer::Launch&);
