// Concatenation of MLA's keys on CUDA.
#include <flashinfer/cuda/concat_ops.cuh>

namespace flashinfer {

void concat_mla_k(const ConcatMlaParams& params, const Launch& where) { cuda::concat_mla_k(params, where); }

}  // namespace flashinfer
