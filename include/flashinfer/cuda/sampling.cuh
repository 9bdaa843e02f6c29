// Sampling, softmax, filters and speculative verification on CUDA: which kernel.
#pragma once

#include <flashinfer/cuda/sampling/chain.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/plain.cuh>

namespace flashinfer::cuda {

inline void sample_rows(const SampleParams& p, const Launch& where) {
  if (launch_few_samples(p, where) || launch_nucleus_samples(p, where)) return;
  if (p.filters()) return launch_samples(p, where);
  const Shape shape = plain_shape(p.num_outputs, p.vocab_size, where.device);
  const Groups groups = Groups::of(p, shape, 4, where.device);
  launch_rows<plain_kernel>(shape, groups.count, where, p, groups.outputs);
}

inline void map_rows(const MapRowsParams& p, const Launch& where) {
  p.map == RowMap::kTopKMask ? launch_masks(p, where) : launch_maps(p, where);
}

inline void chain_sample(const ChainParams& p, const Launch& where) {
  launch_rows<chain_kernel>(plain_shape(p.batch_size, p.vocab_size, where.device), p.batch_size, where, p);
}

}  // namespace flashinfer::cuda
