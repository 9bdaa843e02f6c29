// Long rows renormalised by top-p.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/nucleus.cuh>

namespace flashinfer::cuda {

__global__ void __launch_bounds__(kHeldThreads, kStreamBlocks)
    nucleus_map_kernel(const __grid_constant__ MapRowsParams p) {
  each_row(p.input, p.num_rows, p.vocab_size,
           [&](StreamRow& stream, int64_t row, const Source& source, const Source& next) {
             NucleusRow x{stream};
             const double top_p = p.number.get_real(row, row);
             Totals totals{{1, 1}, 0, false};
             float t = 0;
             bool backwards = false;
             if (top_p < 1) {
               backwards = find_nucleus(x, top_p, source, Source{}, 0, totals, t);
             } else {
               totals = sum_row(x, source, Source{}, 0);
             }
             const bool valid = totals.valid && top_p == top_p;
             const float otherwise = top_p == top_p && x.e.largest_bits(x.sums(), x.e.chunks) == 0 ? 0.0f : NAN;
             const Normalizer by = valid ? Normalizer::of(totals.real()) : Normalizer{1, 1};
             const auto write = [&](Chunk& one, Chunk& other, int pair) {
               const auto change = [&](float& l) { l = !valid ? otherwise : l >= t && l > 0 ? by(l) : 0.0f; };
               one.each(change), other.each(change);
               x.store(p.output, p.input.dtype, row, pair, one, other);
             };
             x.turn();
             backwards ? x.pass<false>(source, next, 2, 0.0f, write) : x.pass<true>(source, next, 2, 0.0f, write);
             stream = x;
           });
}

void launch_nucleus_maps(const MapRowsParams& p, const Shape& shape, int64_t grid, const Launch& where) {
  launch_clusters<nucleus_map_kernel>(shape, grid, where, p);
}

}  // namespace flashinfer::cuda
