// Draws from filtered rows that are too long for shared memory.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

void launch_streamed_samples(const SampleParams& p, const Shape& shape, const OutputSplit& split, const Launch& where) {
  launch_rows<sample_kernel<false>>(shape, split.clusters, where, p, split.outputs_per_cluster);
}

}  // namespace flashinfer::cuda
