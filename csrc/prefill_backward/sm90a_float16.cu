// Register the 9.0a kernels of attention's gradients for float16.
#include <flashinfer/cuda/attention/backward/kernels.h>
#include <flashinfer/cuda/attention/backward/sm90/launch.cuh>

namespace flashinfer::cuda {
namespace {

const Registered<BackwardKernels> kKernels({90, DType::kFloat16, sm90::plan_backward<half_t>,
                                            sm90::launch_backward<half_t>});

}  // namespace
}  // namespace flashinfer::cuda
