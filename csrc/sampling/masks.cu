// Masked logits.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/top_k.cuh>

namespace flashinfer::cuda {

void launch_masks(const MapRowsParams& p, const Launch& where) {
  if (launch_candidate_maps(p, where)) return;
  if (fits_cluster_smem(p.num_rows, p.vocab_size, where.device)) return launch_cluster_smem_maps(p, where);
  const Shape shape = resident_shape(p.num_rows, p.vocab_size, where.device);
  if (!shape.resident) return launch_streamed_maps(p, shape, where);
  launch_rows<mask_kernel<true>>(shape, p.num_rows, where, p);
}

}  // namespace flashinfer::cuda
