// Register the 9.0a kernels of attention's gradients for bfloat16.
#include <flashinfer/cuda/attention/backward/kernels.h>
#include <flashinfer/cuda/attention/backward/sm90/launch.cuh>

namespace flashinfer::cuda {
namespace {

const Registered<BackwardKernels> kKernels({90, DType::kBFloat16, sm90::plan_backward<bfloat16_t>,
                                            sm90::launch_backward<bfloat16_t>});

}  // namespace
}  // namespace flashinfer::cuda
