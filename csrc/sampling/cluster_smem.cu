// Filtered draws and maps of rows in the shared memory of a cluster.
#include <flashinfer/cuda/sampling/cluster_smem_kernels.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>

namespace flashinfer::cuda {

void launch_cluster_smem_samples(const SampleParams& p, const Launch& where) {
  launch_rows<cluster_smem_sample_kernel>(cluster_smem_shape(p.vocab_size), p.num_outputs, where, p);
}

void launch_cluster_smem_maps(const MapRowsParams& p, const Launch& where) {
  launch_rows<cluster_smem_map_kernel>(cluster_smem_shape(p.vocab_size), p.num_rows, where, p);
}

}  // namespace flashinfer::cuda
