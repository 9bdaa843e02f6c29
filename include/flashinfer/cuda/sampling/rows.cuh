// Kernels of whole rows: load x >= 0, filter, then draw or write.
#pragma once

#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/sampling/draw.cuh>
#include <flashinfer/cuda/sampling/threshold.cuh>

namespace flashinfer::cuda {

// Set the remap of chunks that are not resident, for later passes.
template <typename F>
__device__ __forceinline__ void set_remap(const F& f) {
  set_scratch([&](Scratch& s) { f(s.remap); });
}

template <bool kResident>
__device__ __forceinline__ Totals load_probs(ClusterRow<kResident>& cluster_row) {
  cluster_row.template transform<true, true>([](float x) { return max_nan(x, 0.0f); }, NoChunk{});
  return cluster_row.totals();
}

// Load exp((l - max l) / T) with sums. Logits below the k largest count as -inf.
template <bool kResident>
__device__ __forceinline__ Totals load_exponentials(ClusterRow<kResident>& cluster_row, double temperature,
                                                    TopK top_k = {}) {
  set_remap([](Remap& to) { to.is_raw = true; });
  cluster_row.template read_maxima<true>();
  // Rows that are not resident have no buffer of maxima: read_maxima() writes them to the sums.
  const float top = largest_of(kResident ? cluster_row.maxima() : cluster_row.sums(), cluster_row.chunks),
              scale = exponent_scale(temperature);
  if (top != top) return {{1, 1}, 0, false};
  const float least = top_k.on ? Signed::real(top_k_key<Signed>(cluster_row, top_k.k)) : -INFINITY;
  set_remap([&](Remap& to) {
    to = {}, to.is_exponential = true;
    to.least = least, to.top = top, to.scale = scale;
  });
  const Remap remap = scratch().remap;
  const float* maxima = cluster_row.maxima();
  cluster_row.template transform<false, false>([remap](float x) { return remap.exponential(x); },
                                               [maxima, least](int c) { return kResident && maxima[c] < least; });
  return cluster_row.totals();
}

// Load softmax(l / T) in float, with sums.
template <bool kResident>
__device__ __forceinline__ Totals load_softmax(ClusterRow<kResident>& cluster_row, double temperature, TopK top_k) {
  const Totals totals = load_exponentials(cluster_row, temperature, top_k);
  if (!totals.valid) return totals;
  const Normalizer by = Normalizer::of(totals.real());
  set_remap([&](Remap& to) { to.normalizer = by, to.is_normalized = true; });
  const float* sums = cluster_row.sums();
  cluster_row.template transform<true, false>([by](float x) { return by(x); }, [sums](int c) { return sums[c] == 0; });
  return cluster_row.totals();
}

// Values of the filters of one output.
struct Filters {
  TopK top_k;
  bool has_top_p, has_min_p;
  double top_p, min_p, temperature;

  __device__ static Filters of(const SampleParams& p, int64_t output, int64_t row) {
    Filters f{};
    if (p.has_top_k) f.top_k = top_k_of(p.top_k.get_integer(output, row), p.vocab_size);
    f.top_p = p.has_top_p ? p.top_p.get_real(output, row) : 1.0;
    f.min_p = p.has_min_p ? p.min_p.get_real(output, row) : 0.0;
    f.has_top_p = !(f.top_p >= 1), f.has_min_p = !(f.min_p <= 0);
    f.temperature = p.is_logits ? p.temperature.get_real(output, row) : 1.0;
    return f;
  }
  __device__ bool valid() const { return top_p == top_p && min_p == min_p; }
  __device__ bool operator==(const Filters& o) const {
    return top_k.on == o.top_k.on && top_k.k == o.top_k.k && top_p == o.top_p && min_p == o.min_p &&
           temperature == o.temperature;
  }
};

// Apply the filters and return the threshold. Afterwards the chunk sums are sums of kept elements.
// `row_totals` holds the row's total at entry, and the total of kept elements at return.
template <bool kResident>
__device__ float apply_filters(ClusterRow<kResident>& cluster_row, const Filters& f, bool top_k_first, DType dtype,
                               Totals& row_totals) {
  float t = 0;
  if (!row_totals.valid || !f.valid()) {
    row_totals.valid = false;
    return t;
  }
  if (!f.top_k.on && !f.has_top_p && !f.has_min_p) return t;
  float maximum = cluster_row.largest();
  if (f.has_min_p) t = f.min_p >= 1 ? maximum : static_cast<float>(f.min_p) * maximum;
  if (f.top_k.on) t = fmaxf(t, __uint_as_float(top_k_key<Unsigned>(cluster_row, f.top_k.k)));
  if (f.has_top_p) {
    if (f.top_k.on && top_k_first) {
      cluster_row.sum_kept(t);
      const Normalizer by = Normalizer::of(cluster_row.totals(row_totals.fixed).real());
      set_remap([&](Remap& to) { to.renormalizer = by, to.threshold = t, to.dtype = dtype, to.is_filtered = true; });
      const float* sums = cluster_row.sums();
      cluster_row.template transform<true, false>([=](float x) { return x >= t ? rounded(by(x), dtype) : 0.0f; },
                                                  [sums](int c) { return sums[c] == 0; });
      row_totals = cluster_row.totals();
      maximum = cluster_row.largest(), t = 0;
    }
    t = fmaxf(t, top_p_threshold(cluster_row, f.top_p, row_totals, maximum));
  }
  cluster_row.sum_kept(t);
  const Totals kept = cluster_row.totals(row_totals.fixed);
  row_totals.total = kept.total, row_totals.valid = kept.valid;
  return t;
}

// Adjacent outputs with the same row and filter values. They share one load and one threshold.
struct OutputRun {
  int64_t row, end;

  __device__ static int64_t row_of(const SampleParams& p, int64_t output) {
    if (!p.indices.data) return output;
    const int64_t at = output * p.indices.stride;
    return p.indices.dtype == DType::kInt64 ? static_cast<const int64_t*>(p.indices.data)[at]
                                            : static_cast<const int32_t*>(p.indices.data)[at];
  }

  __device__ static OutputRun from(const SampleParams& p, int64_t output, int64_t end, const Filters& filters) {
    const int64_t row = row_of(p, output);
    for (int64_t next = output + 1; next < end; next += 32) {
      const int64_t own_output = next + lane_id();
      const bool same = own_output < end && row_of(p, own_output) == row && Filters::of(p, own_output, row) == filters;
      const unsigned others = __ballot_sync(kAllLanes, !same);
      if (others) return {row, next + __ffs(others) - 1};
    }
    return {row, end};
  }
};

__device__ __forceinline__ void write_sample(const SampleParams& p, int64_t output, int64_t token, bool valid) {
  if (p.wide_samples) {
    static_cast<int64_t*>(p.samples)[output] = token;
  } else {
    static_cast<int32_t*>(p.samples)[output] = static_cast<int32_t>(token);
  }
  p.valid[output] = valid;
}

// Draw the outputs [first, end) of an OutputRun. The warps of the cluster divide them.
template <bool kResident>
__device__ __forceinline__ void draw_run(const SampleParams& p, const ClusterRow<kResident>& cluster_row, int64_t first,
                                         int64_t end, const Totals& totals, float t) {
  const int64_t step = cluster_row.size * cluster_row.warps();
  int64_t output = first + cluster_row.rank * cluster_row.warps() + cluster_row.warp();
  if (output >= end) return;
  const Draw<kResident> draw(cluster_row, totals, t);
  for (; output < end; output += step) {
    const int64_t token = draw(p.random.draw(output, 0));
    if (lane_id() == 0) write_sample(p, output, token, totals.valid);
  }
}

// Draw a cluster's outputs. prepare(cluster_row, filters, totals) returns the threshold of a row, and
// draw(cluster_row, first, end, totals, threshold) draws outputs from it.
template <bool kResident, typename F, typename D>
__device__ __forceinline__ void sample_outputs(const SampleParams& p, int64_t outputs_per_cluster, const F& prepare,
                                               const D& draw) {
  ClusterRow<kResident> cluster_row = ClusterRow<kResident>::of(p.vocab_size);
  const int64_t begin = blockIdx.x / cluster_row.size * outputs_per_cluster,
                end = min(begin + outputs_per_cluster, p.num_outputs);
  cluster_row.start();
  wait_for_inputs();
  launch_dependents();
  for (int64_t output = begin; output < end;) {
    const int64_t row = OutputRun::row_of(p, output);
    const bool exists = row >= 0 && row < p.num_rows;
    Filters filters{};
    if (exists) filters = Filters::of(p, output, row);
    const int64_t next = exists ? OutputRun::from(p, output, end, filters).end : output + 1;
    Totals totals{{1, 1}, 0, false};
    float t = 0;
    if (exists) {
      set_scratch([&](Scratch& s) {
        s.source = Source::of(p.input, row * p.input.stride, p.vocab_size);
        s.remap = {}, s.subtracts = false;
      });
      t = prepare(cluster_row, filters, totals);
      if constexpr (kResident) cluster_row.sync();  // draws read data that other CTAs have written
    }
    draw(cluster_row, output, next, totals, t);
    output = next;
    cluster_row.sync_reads();  // other CTAs may draw from this CTA's memory
  }
}

// Draw a cluster's outputs. After prepare(), the chunk sums are sums of kept elements.
template <bool kResident, typename F>
__device__ __forceinline__ void sample_outputs(const SampleParams& p, int64_t outputs_per_cluster, const F& prepare) {
  sample_outputs<kResident>(p, outputs_per_cluster, prepare,
                            [&](const ClusterRow<kResident>& cluster_row, int64_t first, int64_t end,
                                const Totals& totals, float t) { draw_run(p, cluster_row, first, end, totals, t); });
}

// Load a row and return its threshold. Afterwards the chunk sums are sums of kept elements.
template <bool kLogits, bool kResident>
__device__ __forceinline__ float prepare_row(const SampleParams& p, ClusterRow<kResident>& cluster_row,
                                             const Filters& f, Totals& totals) {
  if constexpr (!kLogits) {
    totals = load_probs(cluster_row);
    return apply_filters(cluster_row, f, p.top_k_first, p.input.dtype, totals);
  }
  // top_k masks logits before they become probabilities.
  const bool masked = p.top_k_first && f.top_k.on;
  Filters rest = f;
  if (masked) rest.top_k = {};
  totals = load_softmax(cluster_row, f.temperature, masked ? f.top_k : TopK{});
  return apply_filters(cluster_row, rest, false, DType::kFloat32, totals);
}

// 512 threads may use all registers. With more threads, registers would spill, and the spills exceed the L1
// cache.
template <bool kResident>
__global__ void __launch_bounds__(512, 1)
    sample_kernel(const __grid_constant__ SampleParams p, int64_t outputs_per_cluster) {
  sample_outputs<kResident>(p, outputs_per_cluster,
                            [&](ClusterRow<kResident>& cluster_row, const Filters& f, Totals& totals) {
                              return p.is_logits ? prepare_row<true>(p, cluster_row, f, totals)
                                                 : prepare_row<false>(p, cluster_row, f, totals);
                            });
}

// softmax and renormalised rows, one cluster per row.
template <bool kResident>
__global__ void __launch_bounds__(512, 1) map_kernel(const __grid_constant__ MapRowsParams p) {
  ClusterRow<kResident> cluster_row = ClusterRow<kResident>::of(p.vocab_size);
  const int64_t row = blockIdx.x / cluster_row.size;
  cluster_row.start();
  wait_for_inputs();
  launch_dependents();
  set_scratch([&](Scratch& s) {
    s.source = Source::of(p.input, row * p.input.stride, p.vocab_size);
    s.remap = {};
  });
  DType dtype = p.input.dtype;
  Normalizer by{1, 1};
  float t = 0, otherwise = NAN;
  Totals totals;
  if (p.map == RowMap::kSoftmax) {
    dtype = DType::kFloat32;
    totals = load_exponentials(cluster_row, p.parameter.get_real(row, row));
  } else {
    Filters f{};
    f.top_p = p.map == RowMap::kTopPRenorm ? p.parameter.get_real(row, row) : 1.0, f.has_top_p = !(f.top_p >= 1);
    if (p.map == RowMap::kTopKRenorm) f.top_k = top_k_of(p.parameter.get_integer(row, row), p.vocab_size);
    totals = load_probs(cluster_row);
    if (f.valid() && cluster_row.largest_bits(cluster_row.sums(), cluster_row.chunks) == 0) otherwise = 0;
    t = apply_filters(cluster_row, f, false, dtype, totals);
  }
  if (totals.valid) by = Normalizer::of(totals.real());
  cluster_row.for_own_chunks([&](int c) {
    Chunk chunk;
    cluster_row.load(chunk, c);
    chunk.for_each([&](float& x) { x = totals.valid ? (x >= t ? by(x) : 0.0f) : otherwise; });
    store_chunk(p.output, dtype, row, chunk, int64_t{c} * kSumChunk, p.vocab_size);
  });
  cluster_row.sync_reads();  // other CTAs may read this CTA's bins
}

}  // namespace flashinfer::cuda
