// Gate of products in memory, for calls whose GEMM cannot fuse it.
#include <flashinfer/cuda/moe/activate.cuh>

namespace flashinfer {

void gate_rows(const ActivateParams& params, const Launch& where) {
  switch (params.dtype) {
    case DType::kFloat16: return cuda::activate_rows<half_t>(params, where);
    case DType::kBFloat16: return cuda::activate_rows<bfloat16_t>(params, where);
    default: return cuda::activate_rows<float>(params, where);
  }
}

}  // namespace flashinfer
