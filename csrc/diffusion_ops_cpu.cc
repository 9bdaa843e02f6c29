// Fused norm and rotation of diffusion models on the CPU.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/diffusion_ops.h>

namespace flashinfer {

void qk_norm_rope(const QkNormRopeParams& params, const Launch&) { cpu::qk_norm_rope<bfloat16_t>(params); }

}  // namespace flashinfer
