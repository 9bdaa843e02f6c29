// Instances of the Hopper kernel of attention's gradients, for test_backward_kernels.py to read what ptxas
// and the disassembler say.
#include <flashinfer/cuda/attention/backward/sm90/launch.cuh>

namespace flashinfer::cuda {

void (*const instances[])(const PrefillBackwardParams&, const Launch&) = {
    sm90::launch_backward<half_t>,
    sm90::launch_backward<bfloat16_t>,
};

}  // namespace flashinfer::cuda
