// Draws from filtered rows.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

void launch_samples(const SampleParams& p, const Launch& where) {
  if (!p.indices.data && fits_cluster_smem(p.num_outputs, p.vocab_size, where.device))
    return launch_cluster_smem_samples(p, where);
  const Shape shape = resident_shape(p.num_outputs, p.vocab_size, where.device);
  const OutputSplit split = OutputSplit::of(p, shape, 2, where.device);
  if (!shape.resident) return launch_streamed_samples(p, shape, split, where);
  launch_rows<sample_kernel<true>>(shape, split.clusters, where, p, split.outputs_per_cluster);
}

}  // namespace flashinfer::cuda
