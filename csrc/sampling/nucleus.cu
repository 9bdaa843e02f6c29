// Draws by top-p from many rows, and renormalisation by top-p.
#include <algorithm>

#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/nucleus.cuh>

namespace flashinfer::cuda {

// Call work(x, row, elements, next) for the CTA's rows. `next` has the elements of its next row.
template <typename T, typename F>
__device__ __forceinline__ void for_nucleus(const RowsOf& rows, int64_t count, int64_t n, const F& work) {
  NucleusRow x(static_cast<int>(n));
  wait_for_inputs();
  launch_dependents();
  const auto elements = [&](int64_t row) { return static_cast<const T*>(rows.data) + row * rows.stride; };
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    const int64_t after = row + gridDim.x;
    work(x, row, elements(row), after < count ? elements(after) : nullptr);
  }
}

// A separate function, so that it takes no registers from the passes.
__device__ inline __noinline__ void draw_nucleus(const SampleParams& p, int64_t row, const Totals& totals, float t) {
  const Source source = Source::of(p.input, row * p.input.stride, p.vocab_size);
  const NucleusRow x(static_cast<int>(p.vocab_size));
  x.draw_from(source, 0.0f, p, row, totals, t, [](float value) { return max_nan(value, 0.0f); });
}

template <typename T>
__global__ void __launch_bounds__(kNucleusThreads, 1) nucleus_kernel(const __grid_constant__ SampleParams p) {
  for_nucleus<T>(p.input, p.num_outputs, p.vocab_size,
                 [&](NucleusRow& x, int64_t row, const T* elements, const T* next) {
                   Totals totals{{1, 1}, 0, false};
                   const float t = x.filter<false>(elements, next, p.top_p.get_real(row, row), totals);
                   draw_nucleus(p, row, totals, t);
                 });
}

template <typename T>
__global__ void __launch_bounds__(kNucleusThreads, 1) nucleus_map_kernel(const __grid_constant__ MapRowsParams p) {
  for_nucleus<T>(p.input, p.num_rows, p.vocab_size, [&](NucleusRow& x, int64_t row, const T* elements, const T* next) {
    Totals totals{{1, 1}, 0, false};
    const double top_p = p.parameter.get_real(row, row);
    const float t = x.filter<true>(elements, next, top_p, totals);
    T* to = static_cast<T*>(p.output) + row * p.vocab_size;
    if (totals.valid) {
      const Normalizer by = Normalizer::of(totals.real());
      x.map(elements, to, [&](float value) { return value >= t ? by(value) : 0.0f; });
    } else {
      const float otherwise =
          top_p == top_p && x.cluster_row.largest_bits(x.sums(), x.cluster_row.chunks) == 0 ? 0.0f : NAN;
      x.map(elements, to, [&](float) { return otherwise; });
    }
    __syncthreads();
  });
}

// Shape for at least `least` rows that allow loads of four elements. `bytes` is 0 if it does not serve the
// call.
inline Shape nucleus_shape(const RowsOf& rows, int64_t count, int64_t least, int64_t vocab_size, int device) {
  const int64_t piece = 4 * (rows.dtype == DType::kFloat32 ? 4 : 2);
  const bool serves = count >= least && PipelinedRow::fits(vocab_size) && vocab_size % 4 == 0 && rows.stride % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(rows.data) % piece == 0 &&
                      NucleusRow::bytes() + static_cast<int64_t>(sizeof(NucleusState)) <= shared_memory(device);
  return {1, kNucleusThreads, serves ? NucleusRow::bytes() : 0, false};
}

template <auto kFloat, auto kHalf, auto kBFloat16, typename Params>
bool launch_nucleus(const Params& p, int64_t rows, int64_t least, const Launch& where) {
  const Shape shape = nucleus_shape(p.input, rows, least, p.vocab_size, where.device);
  if (shape.bytes == 0) return false;
  const int64_t blocks = std::min(rows, int64_t{device_info(where.device).num_sms});
  if (p.input.dtype == DType::kFloat32) {
    launch_rows<kFloat>(shape, blocks, where, p);
  } else if (p.input.dtype == DType::kFloat16) {
    launch_rows<kHalf>(shape, blocks, where, p);
  } else {
    launch_rows<kBFloat16>(shape, blocks, where, p);
  }
  return true;
}

// Fewer rows than a third of the SMs are faster in clusters: there, 32 rows take 35 us and 48 rows 61 us. Here
// 1 to 132 rows take 45 us.
bool launch_nucleus_samples(const SampleParams& p, const Launch& where) {
  if (p.is_logits || p.indices.data || !p.has_top_p || p.has_top_k || p.has_min_p) return false;
  const int64_t least = device_info(where.device).num_sms / 3;
  return launch_nucleus<nucleus_kernel<float>, nucleus_kernel<half_t>, nucleus_kernel<bfloat16_t>>(p, p.num_outputs,
                                                                                                   least, where);
}

bool launch_nucleus_maps(const MapRowsParams& p, const Launch& where) {
  if (p.map != RowMap::kTopPRenorm) return false;
  return launch_nucleus<nucleus_map_kernel<float>, nucleus_map_kernel<half_t>, nucleus_map_kernel<bfloat16_t>>(
      p, p.num_rows, device_info(where.device).num_sms, where);
}

}  // namespace flashinfer::cuda
