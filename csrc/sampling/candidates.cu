// Draws from long rows by filters that keep few elements, or without filters.
#include <flashinfer/cuda/sampling/candidates.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>

namespace flashinfer::cuda {

template <bool kLogits>
__device__ __forceinline__ void draw_candidates(CandidateRow& x, const SampleParams& p, int64_t row,
                                                const Source& source, const Source& next) {
  const Filters f = Filters::of(p, row, row);
  const float largest = x.stream<kLogits>(source, next, f, [](int) {});
  const uint32_t total = scratch().counter;
  const bool fits = total <= kCollected;
  if (f.top_k.on && !fits) return sample_again<kLogits>(p, source, row);
  const uint64_t k = f.top_k.k;
  float t = 0;
  Totals totals{{1, 1}, 0, false};
  if constexpr (kLogits) {
    Exponential exponential{-INFINITY, largest, exponent_scale(f.temperature)};
    Normalizer by{1, 1};
    if (largest == largest && f.valid()) {
      exponential.least = Signed::real(x.search<false>(x, total, 0, Signed::key(largest), k, {}).key);
      x.change([&](uint32_t key) { return exponential(Signed::real(key)); });
      x.sum_collected(0);
      totals = x.totals();
    }
    if (totals.valid) {
      by = Normalizer::of(totals.real());
      x.change([&](uint32_t key) { return by(__uint_as_float(key)); });
      x.sum_collected(0);
      totals = x.totals();
    }
    if (totals.valid && f.has_top_p) {
      const uint32_t max_key = __float_as_uint(by(exponential(largest)));
      t = __uint_as_float(x.top_p_among(total, f.top_p, totals, 1, max_key));
      x.sum_collected(t);
      totals.total = x.totals(totals.fixed).total;
    }
    return x.draw_from(source, -INFINITY, p, row, totals, t, [&](float l) { return by(exponential(l)); });
  } else {
    totals = x.totals();
    totals.valid = totals.valid && f.valid();
    float first_threshold = 0;
    Normalizer by{1, 1};
    bool rescaled = false;
    if (totals.valid && (f.top_k.on || f.has_min_p)) {
      if (f.has_min_p) t = f.min_p >= 1 ? largest : static_cast<float>(f.min_p) * largest;
      if (f.top_k.on) {
        t = fmaxf(t, __uint_as_float(x.search<false>(x, total, 0, __float_as_uint(largest), k, {}).key));
        if (f.has_top_p) {
          x.sum_collected(t);
          const Totals kept = x.totals(totals.fixed);
          uint32_t least = __float_as_uint(t), max_key = __float_as_uint(largest);
          if (p.top_k_first) {
            rescaled = true, first_threshold = t, by = Normalizer::of(kept.real());
            const DType dtype = p.input.dtype;
            const auto change = [&](float value) {
              return value >= first_threshold ? rounded(by(value), dtype) : 0.0f;
            };
            x.change([&](uint32_t key) { return change(__uint_as_float(key)); });
            x.sum_collected(0);
            totals = x.totals();
            least = __float_as_uint(change(t)), max_key = __float_as_uint(change(largest));
            t = 0;
          }
          if (rescaled || kept.real() >= f.top_p * totals.real())
            t = fmaxf(t, __uint_as_float(x.top_p_among(total, f.top_p, totals, least, max_key)));
        }
      }
      fits ? x.sum_collected(t) : x.sum_again(source, t);
      const Totals kept = x.totals(totals.fixed);
      totals.total = kept.total, totals.valid = kept.valid;
    }
    x.draw_from(source, 0.0f, p, row, totals, t, [&](float value) {
      value = max_nan(value, 0.0f);
      return rescaled ? (value >= first_threshold ? rounded(by(value), p.input.dtype) : 0.0f) : value;
    });
  }
}

template <bool kLogits>
__global__ void __launch_bounds__(kClusterSmemThreads, kStreamBlocks)
    candidate_kernel(const __grid_constant__ SampleParams p) {
  for_rows(p.input, p.num_outputs, p.vocab_size,
           [&](PipelinedRow& stream, int64_t row, const Source& source, const Source& next) {
             CandidateRow x{stream};
             draw_candidates<kLogits>(x, p, row, source, next);
             __syncthreads();
             x.copy(next, 1, x.pairs_read + 1);
             stream = x;
           });
}

// Draws from softmax(l / T) without filters; counterpart of unfiltered.cuh.
__global__ void __launch_bounds__(kClusterSmemThreads, kStreamBlocks)
    logits_kernel(const __grid_constant__ SampleParams p) {
  for_rows(p.input, p.num_outputs, p.vocab_size,
           [&](PipelinedRow& x, int64_t row, const Source& source, const Source& next) {
             const float scale = exponent_scale(p.temperature.get_real(row, row));
             x.pass(source, next, 2, -INFINITY, [&](Chunk& one, Chunk& other, int pair) {
               const PairSums of = exponentials_of(one, other, scale);
               x.store_sums(x.maxima(), pair, of.maximum), x.store_sums(x.sums(), pair, of.sum);
             });
             __syncthreads();
             const float top = largest_of(x.maxima(), x.cluster_row.chunks);
             rescale(x.sums(), x.maxima(), x.cluster_row.chunks, top, scale);
             const Exponential exponential{-INFINITY, top, scale};
             x.draw_from(source, -INFINITY, p, row, x.totals(), 0.0f, exponential);
           });
}

bool launch_candidate_samples(const SampleParams& p, const Launch& where) {
  const Shape shape = stream_shape(p.num_outputs, p.vocab_size, where.device);
  if (shape.bytes == 0 || p.indices.data) return false;
  const bool few = p.has_top_k && !p.top_k.data && p.top_k.integer <= kMaxCandidateTopK;
  if (p.has_top_k && !few) return false;
  const int64_t grid = stream_blocks(p.num_outputs, where.device);
  if (p.is_logits) {
    if (!p.filters()) return launch_rows<logits_kernel>(shape, grid, where, p), true;
    if (!few || !p.top_k_first || p.has_min_p) return false;
    launch_rows<candidate_kernel<true>>(shape, grid, where, p);
  } else {
    if (!few && p.has_top_p) return false;
    launch_rows<candidate_kernel<false>>(shape, grid, where, p);
  }
  return true;
}

}  // namespace flashinfer::cuda
