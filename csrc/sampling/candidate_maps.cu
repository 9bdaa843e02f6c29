// Masks and renormalisation of long rows that keep few elements.
#include <flashinfer/cuda/sampling/candidates.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/top_k.cuh>

namespace flashinfer::cuda {

__device__ inline __noinline__ void mask_again(const MapRowsParams& p, int64_t row, TopK top_k) {
  GlobalRow cluster_row = GlobalRow::of(p.vocab_size);
  const float least = Signed::real(kth_largest_key(cluster_row, p.input, row, top_k));
  cluster_row.for_own_chunks([&](int c) {
    Chunk chunk;
    cluster_row.load(chunk, c);
    chunk.for_each([&](float& x) { x = x < least ? -INFINITY : x; });
    store_chunk(p.output, p.input.dtype, row, chunk, int64_t{c} * kSumChunk, p.vocab_size);
  });
  __syncthreads();
}

__device__ inline __noinline__ void renorm_again(const MapRowsParams& p, int64_t row, TopK top_k) {
  GlobalRow cluster_row = GlobalRow::of(p.vocab_size);
  set_scratch([&](Scratch& s) { s.source = Source::of(p.input, row * p.input.stride, p.vocab_size), s.remap = {}; });
  Totals totals = load_probs(cluster_row);
  const float t = __uint_as_float(top_k_key<Unsigned>(cluster_row, top_k.k));
  cluster_row.sum_kept(t);
  const Normalizer by = Normalizer::of(cluster_row.totals(totals.fixed).real());
  cluster_row.for_own_chunks([&](int c) {
    Chunk chunk;
    cluster_row.load(chunk, c);
    chunk.for_each([&](float& x) { x = x >= t ? by(x) : 0.0f; });
    store_chunk(p.output, p.input.dtype, row, chunk, int64_t{c} * kSumChunk, p.vocab_size);
  });
  __syncthreads();
}

// Write the fill value while reading the row, then the few kept elements.
template <bool kMask>
__global__ void __launch_bounds__(kClusterSmemThreads, kStreamBlocks)
    candidate_map_kernel(const __grid_constant__ MapRowsParams p) {
  for_rows(p.input, p.num_rows, p.vocab_size,
           [&](PipelinedRow& stream, int64_t row, const Source& source, const Source& next) {
             CandidateRow x{stream};
             const DType dtype = p.input.dtype;
             Filters f{};
             f.top_k = top_k_of(p.parameter.get_integer(row, row), p.vocab_size);
             const auto fill = [&](int pair, float value) {
               Chunk chunk;
               chunk.for_each([&](float& at) { at = value; });
               x.store(p.output, dtype, row, pair, chunk, chunk);
             };
             const float largest =
                 x.template stream<kMask>(source, next, f, [&](int pair) { fill(pair, kMask ? -INFINITY : 0.0f); });
             const uint32_t total = scratch().counter;
             const bool fits = total <= kCollected;
             const auto put = [&](const auto& change) {
#pragma unroll 1
               for (int pair = 0; pair < x.own_pairs; ++pair) {
                 const uint32_t begin = x.begins()[2 * (x.first_pair + pair)],
                                count = x.begins()[2 * (x.first_pair + pair) + 1];
                 for (uint32_t i = begin + lane_id(); i < begin + count; i += 32)
                   change(x.keys()[i], x.chunk_of(pair) * kSumChunk + x.positions()[i]);
               }
             };
             if constexpr (kMask) {
               if (!fits || largest != largest) {
                 mask_again(p, row, f.top_k);
               } else if (total > 0) {
                 const float least =
                     Signed::real(x.template search<false>(x, total, 0, Signed::key(largest), f.top_k.k, {}).key);
                 put([&](uint32_t key, int at) {
                   const float value = Signed::real(key);
                   if (value >= least) store_element(p.output, dtype, row * p.vocab_size + at, value);
                 });
               }
             } else {
               const Totals row_totals = x.totals();
               const bool is_zero = x.cluster_row.largest_bits(x.sums(), x.cluster_row.chunks) == 0;
               if (!row_totals.valid) {
                 if (!is_zero)
                   for (int pair = 0; pair < x.own_pairs; ++pair) fill(pair, NAN);
               } else if (!fits) {
                 renorm_again(p, row, f.top_k);
               } else {
                 const float t = __uint_as_float(
                     x.template search<false>(x, total, 0, __float_as_uint(largest), f.top_k.k, {}).key);
                 x.sum_collected(t);
                 const Normalizer by = Normalizer::of(x.totals(row_totals.fixed).real());
                 put([&](uint32_t key, int at) {
                   const float value = __uint_as_float(key);
                   if (value >= t) store_element(p.output, dtype, row * p.vocab_size + at, by(value));
                 });
               }
             }
             __syncthreads();
             x.copy(next, 1, x.pairs_read + 1);
             stream = x;
           });
}

bool launch_candidate_maps(const MapRowsParams& p, const Launch& where) {
  if (p.map == RowMap::kSoftmax || p.map == RowMap::kTopPRenorm) return false;
  if (p.parameter.data || p.parameter.integer < 0 || p.parameter.integer > kMaxCandidateTopK) return false;
  const Shape shape = stream_shape(p.num_rows, p.vocab_size, where.device);
  if (shape.bytes == 0) return false;
  const int64_t grid = stream_blocks(p.num_rows, where.device);
  p.map == RowMap::kTopKMask ? launch_rows<candidate_map_kernel<true>>(shape, grid, where, p)
                             : launch_rows<candidate_map_kernel<false>>(shape, grid, where, p);
  return true;
}

}  // namespace flashinfer::cuda
