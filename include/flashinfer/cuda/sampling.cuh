// Sampling, softmax, filters and speculative verification on CUDA: the choice of the kernel.
//
// The first line that serves a call wins. R is the number of rows (outputs of draws), V the vocabulary.
// streams: R >= number of SMs, 15,872 < V <= 131,072, no indices, 110 KB of shared memory per CTA (sm_80 and
//          sm_90 on, not sm_86 or sm_89).
// holds:   clusters (sm_90 on), V <= 131,072, R * ceil(V / 16,384) <= 2 * number of SMs, no indices.
//
//   draws by                           condition                                    kernel
//   no filter                          streams                                      candidates.cuh
//   min_p of probabilities             streams                                      candidates.cuh
//   top_k <= 128, equal for all (1)    streams                                      candidates.cuh
//   top_p of probabilities             streams, but R >= SMs / 3; V % 4 == 0;       nucleus.cuh
//                                      225 KB of shared memory (sm_90, sm_100)
//   filters                            holds                                        cluster_smem_kernels.cuh
//   filters                            any                                          rows.cuh (2)
//   no filter                          sums of chunks fit shared memory             unfiltered.cuh
//   no filter                          any                                          segments.cuh
//
//   rows to rows (softmax, renorm, mask)
//   top_k mask or renorm, k <= 128     streams, k equal for all rows                candidates.cuh
//   top_p renorm                       as top_p above, but R >= SMs                 nucleus.cuh
//   softmax, top_p renorm              holds, but any R                             cluster_smem_kernels.cuh
//   top_k mask or renorm               holds                                        cluster_smem_kernels.cuh
//   any                                any                                          rows.cuh, top_k.cuh (2)
//
//   the k largest with indices         any                                          top_k.cuh (2)
//   verification of drafts             any                                          chain.cuh
//
// (1) Probabilities: also with top_p and min_p. Logits: top_k first, also with top_p.
// (2) As many chunks of a row as fit stay in the shared memory of a cluster. Passes reread the others from
//     the L2 cache, and the whole row if the sums of its chunks leave no room.
//
// Times that decided, in us: H200, float32, V = 128,256, flat rows, at R = 32 / 64 / 512.
//
//                       rows or unfiltered      others
//   no filter           22 / 27 / 83            candidates: 80 at 512; unfiltered in at most one CTA per SM: 15 / 18
//   min_p 0.1           29 / 26 / 149           cluster_smem: 15 at 32; candidates: 130 at 512
//   top_k 50            52 / 37 / 202           cluster_smem: 27 at 32, 244 at 512; candidates: 120 at 512
//   top_p 0.9           62 / 69 / 384           cluster_smem: 35 at 32, 61 at 48; nucleus: 45 at 64, 179 at 512
//   top_k 50, top_p     86 / 78 / 450           cluster_smem: 47 at 32, 443 at 512; candidates: 135 at 512
//   softmax             26 / 29 / 249           cluster_smem: 15 / 30 / 191; three streamed passes: 249 at 512
//   top_p renorm 0.9    58 / 73 / 456           cluster_smem: 36 / 62 / 375; nucleus: 65 at 64, 282 at 512
//   top_k mask 50       37 / 32 / 237           cluster_smem: 23 at 32; candidates: 161 at 512
//   top_k renorm 50     49 / 41 / 277           cluster_smem: 28 at 32; candidates: 174 at 512
#pragma once

#include <flashinfer/cuda/sampling/chain.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/segments.cuh>
#include <flashinfer/cuda/sampling/unfiltered.cuh>

namespace flashinfer::cuda {

inline void sample_rows(const SampleParams& p, const Launch& where) {
  if (launch_candidate_samples(p, where) || launch_nucleus_samples(p, where)) return;
  if (p.filters()) return launch_samples(p, where);
  if (p.vocab_size > longest_row(true, where.device)) {
    const Shape shape = segments_shape(p.num_outputs, p.vocab_size, where.device);
    const OutputSplit split = OutputSplit::of(p, shape, 1, where.device);
    return launch_rows<segments_kernel>(shape, split.clusters, where, p, split.outputs_per_cluster);
  }
  const Shape shape = unfiltered_shape(p.num_outputs, p.vocab_size, where.device);
  const OutputSplit split = OutputSplit::of(p, shape, 4, where.device);
  launch_rows<unfiltered_kernel>(shape, split.clusters, where, p, split.outputs_per_cluster);
}

inline void map_rows(const MapRowsParams& p, const Launch& where) {
  p.map == RowMap::kTopKMask ? launch_masks(p, where) : launch_maps(p, where);
}

inline void chain_sample(const ChainParams& p, const Launch& where) {
  launch_rows<chain_kernel>(unfiltered_shape(p.batch_size, p.vocab_size, where.device), p.batch_size, where, p);
}

}  // namespace flashinfer::cuda
