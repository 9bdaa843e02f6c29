// Kernels for rows in the smem of a cluster: counterparts of those in rows.cuh and top_k.cuh.
#pragma once

#include <flashinfer/cuda/sampling/cluster_smem_rows.cuh>

namespace flashinfer::cuda {

__device__ __forceinline__ ClusterSmemRow start_cluster_smem(int64_t n) {
  ClusterSmemRow x;
  x.cluster_row = GlobalRow::of(n);
  x.cluster_row.arrive();
  wait_for_inputs();
  launch_dependents();
  return x;
}

__global__ void __launch_bounds__(kClusterSmemThreads, kClusterSmemBlocks)
    cluster_smem_sample_kernel(const __grid_constant__ SampleParams p) {
  const int64_t row = blockIdx.x / ptx::cluster_size();
  ClusterSmemRow x = start_cluster_smem(p.vocab_size);
  const Source source = Source::of(p.input, row * p.input.stride, p.vocab_size);
  Filters f = Filters::of(p, row, row);
  Totals totals{{1, 1}, 0, false};
  float t = 0;
  if (!p.is_logits) {
    x.transform<true>([&](const auto& work) { x.read(source, 0.0f, work); }, [](float l) { return max_nan(l, 0.0f); });
    totals = x.totals();
  } else {
    x.read_maxima<true>(source, -INFINITY);
    const float top = largest_of(x.maxima(), x.cluster_row.chunks);
    if (top == top) {
      float least = -INFINITY;
      if (p.top_k_first && f.top_k.on) {
        least = Signed::real(x.top_k_key<Signed>(Signed::key(top), f.top_k.k));
        f.top_k = {};
      }
      x.transform<false>(Exponential{least, top, exponent_scale(f.temperature)});
      totals = x.totals();
      if (totals.valid) {
        x.transform<true>(Normalizer::of(totals.real()));
        totals = x.totals();
      }
    }
  }
  t = x.filter(f, p.top_k_first && !p.is_logits, p.input.dtype, totals);
  x.draw(p, row, totals, t);
  x.cluster_row.sync_reads();  // other CTAs may read this CTA's bins
}

// softmax, renormalised rows and masked logits.
__global__ void __launch_bounds__(kClusterSmemThreads, kClusterSmemBlocks)
    cluster_smem_map_kernel(const __grid_constant__ MapRowsParams p) {
  const int64_t row = blockIdx.x / ptx::cluster_size();
  ClusterSmemRow x = start_cluster_smem(p.vocab_size);
  const Source source = Source::of(p.input, row * p.input.stride, p.vocab_size);
  const auto write = [&](DType dtype, const auto& change) {
    x.for_chunks([&](Chunk& chunk, int warp_chunk) {
      chunk.for_each([&](float& value) { value = change(value); });
      const int64_t at = int64_t{x.chunk(warp_chunk)} * kSumChunk;
      store_chunk(p.output, dtype, row, chunk, at, p.vocab_size);
    });
  };
  if (p.map == RowMap::kTopKMask) {
    const TopK top_k = top_k_of(p.parameter.get_integer(row, row), p.vocab_size);
    x.read_maxima<false>(source, NAN);
    float least = -INFINITY;
    if (top_k.on) {
      uint32_t max_key = 0;
      for (int c = lane_id(); c < x.cluster_row.chunks; c += 32) max_key = max(max_key, Signed::key(x.maxima()[c]));
      least = Signed::real(x.top_k_key<Signed>(__reduce_max_sync(kAllLanes, max_key), top_k.k));
    }
    write(p.input.dtype, [&](float value) { return value < least ? -INFINITY : value; });
  } else {
    DType dtype = p.input.dtype;
    Totals totals{{1, 1}, 0, false};
    float t = 0, otherwise = NAN;
    if (p.map == RowMap::kSoftmax) {
      dtype = DType::kFloat32;
      x.read_maxima<true>(source, -INFINITY);
      const float top = largest_of(x.maxima(), x.cluster_row.chunks);
      if (top == top) {
        x.transform<false>(Exponential{-INFINITY, top, exponent_scale(p.parameter.get_real(row, row))});
        totals = x.totals();
      }
    } else {
      Filters f{};
      f.top_p = p.map == RowMap::kTopPRenorm ? p.parameter.get_real(row, row) : 1.0, f.has_top_p = !(f.top_p >= 1);
      if (p.map == RowMap::kTopKRenorm) f.top_k = top_k_of(p.parameter.get_integer(row, row), p.vocab_size);
      x.transform<true>([&](const auto& work) { x.read(source, 0.0f, work); },
                        [](float value) { return max_nan(value, 0.0f); });
      totals = x.totals();
      if (f.valid() && x.cluster_row.largest_bits(x.sums(), x.cluster_row.chunks) == 0) otherwise = 0;
      t = x.filter(f, false, dtype, totals);
    }
    if (totals.valid) {
      const Normalizer by = Normalizer::of(totals.real());
      write(dtype, [&](float value) { return value >= t ? by(value) : 0.0f; });
    } else {
      write(dtype, [&](float) { return otherwise; });
    }
  }
  x.cluster_row.sync_reads();
}

}  // namespace flashinfer::cuda
