// Filtered draws and maps of rows in the shared memory of a cluster.
#include <flashinfer/cuda/sampling/held_kernels.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>

namespace flashinfer::cuda {

void launch_held_samples(const SampleParams& p, const Launch& where) {
  launch_rows<held_sample_kernel>(held_shape(p.vocab_size), p.num_outputs, where, p);
}

void launch_held_maps(const MapRowsParams& p, const Launch& where) {
  launch_rows<held_map_kernel>(held_shape(p.vocab_size), p.num_rows, where, p);
}

}  // namespace flashinfer::cuda
