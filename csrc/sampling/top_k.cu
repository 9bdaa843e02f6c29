// The k largest elements with their indices.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/top_k.cuh>

namespace flashinfer::cuda {

void launch_top_k(const TopKParams& p, const Launch& where) {
  const Shape shape = resident_shape(p.num_rows, p.vocab_size, where.device);
  shape.resident ? launch_rows<top_k_kernel<true>>(shape, p.num_rows, where, p)
                 : launch_rows<top_k_kernel<false>>(shape, p.num_rows, where, p);
}

}  // namespace flashinfer::cuda
