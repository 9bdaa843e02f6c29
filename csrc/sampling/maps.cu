// softmax and renormalised rows.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

void launch_maps(const MapRowsParams& p, const Launch& where) {
  if (launch_candidate_maps(p, where) || launch_nucleus_maps(p, where)) return;
  // Sums over flat rows and of exponentials are faster in clusters for any number of rows: softmax of 512
  // rows takes 191 us for 249.
  const int64_t rows = p.map == RowMap::kTopKRenorm ? p.num_rows : 1;
  if (fits_cluster_smem(rows, p.vocab_size, where.device)) return launch_cluster_smem_maps(p, where);
  const Shape shape = resident_shape(p.num_rows, p.vocab_size, where.device);
  if (!shape.resident) return launch_streamed_maps(p, shape, where);
  launch_rows<map_kernel<true>>(shape, p.num_rows, where, p);
}

}  // namespace flashinfer::cuda
