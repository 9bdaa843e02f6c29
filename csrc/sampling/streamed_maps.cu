// softmax, renormalised and masked rows that are too long for shared memory.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/top_k.cuh>

namespace flashinfer::cuda {

void launch_streamed_maps(const MapRowsParams& p, const Shape& shape, const Launch& where) {
  p.map == RowMap::kTopKMask ? launch_rows<mask_kernel<false>>(shape, p.num_rows, where, p)
                             : launch_rows<map_kernel<false>>(shape, p.num_rows, where, p);
}

}  // namespace flashinfer::cuda
