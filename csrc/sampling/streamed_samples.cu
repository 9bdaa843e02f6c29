// Draws from filtered rows that are too long for shared memory.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

void launch_streamed_samples(const SampleParams& p, const Shape& shape, const Groups& groups, const Launch& where) {
  launch_rows<sample_kernel<false>>(shape, groups.count, where, p, groups.outputs);
}

}  // namespace flashinfer::cuda
