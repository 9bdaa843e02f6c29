// Draws by top-p from long rows.
#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/nucleus.cuh>

namespace flashinfer::cuda {

__global__ void __launch_bounds__(kHeldThreads, kStreamBlocks) nucleus_kernel(const __grid_constant__ SampleParams p) {
  each_row(p.input, p.num_outputs, p.vocab_size,
           [&](StreamRow& stream, int64_t row, const Source& source, const Source& next) {
             NucleusRow x{stream};
             const Filters f = Filters::of(p, row, row);
             Totals totals{{1, 1}, 0, false};
             float t = 0;
             if (!f.has_top_p || !f.valid()) {
               totals = sum_row(x, source, next, 2);
               totals.valid = totals.valid && f.valid();
             } else if (!find_nucleus(x, f.top_p, source, next, 2, totals, t)) {
               x.start(next);
             }
             x.draw_from(source, 0.0f, p, row, totals, t, [](float value) { return max_nan(value, 0.0f); });
             stream = x;
           });
}

void launch_nucleus_samples(const SampleParams& p, const Shape& shape, int64_t grid, const Launch& where) {
  launch_clusters<nucleus_kernel>(shape, grid, where, p);
}

}  // namespace flashinfer::cuda
