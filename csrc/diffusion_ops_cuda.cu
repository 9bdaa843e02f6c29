// Fused norm and rotation of diffusion models on CUDA.
#include <flashinfer/cuda/diffusion_ops.cuh>

namespace flashinfer {

void qk_norm_rope(const QkNormRopeParams& params, const Launch& where) {
  cuda::qk_norm_rope<bfloat16_t>(params, where);
}

}  // namespace flashinfer
