// Draws and maps of rows on the CPU: a row at a time per thread.
#pragma once

#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/sampling/top_p.h>

namespace flashinfer::cpu {

// A row that is ready for draws: its kept elements and the sums of their chunks.
struct Drawable {
  Row row;
  float threshold = 0;
  std::vector<float> sums;
  Floats buffer;
  std::vector<uint64_t> ends;  // inclusive prefix sums of the chunks
  Mass mass;

  void finish(const Mass& of_row) {
    mass = of_row.valid ? Mass::of(sums, of_row.fixed) : Mass{};
    ends.resize(sums.size());
    uint64_t total = 0;
    for (size_t c = 0; c < sums.size(); ++c) ends[c] = total += mass.fixed(sums[c]);
  }

  // Return the chunk of a draw and the share left in it.
  std::pair<int64_t, uint64_t> find(uint64_t uniform) const {
    const uint64_t share = share_of(uniform, mass.total);
    const int64_t c = std::upper_bound(ends.begin(), ends.end(), share) - ends.begin();
    return {c, share - (c ? ends[c - 1] : 0)};
  }
};

// Return the thread's own row. Allocating one anew takes as long as reading it.
inline Drawable& own_drawable() {
  thread_local Drawable drawable;
  return drawable;
}

// Return the first of `count` elements whose running sum passes `share`. If rounding leaves none, return the
// last kept element.
inline int64_t find_in_chunk(const float* x, int64_t count, uint64_t share, FixedPoint fixed, float threshold) {
  int64_t last = 0;
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!(x[i] >= threshold) || x[i] <= 0) continue;
    last = i;
    if ((sum += fixed(x[i])) > share) return i;
  }
  return last;
}

// Filter values of a row.
struct Filters {
  TopK top_k;
  bool has_top_p, has_min_p, top_k_first;
  double top_p, min_p;

  static Filters of(const SampleParams& p, int64_t output, int64_t row) {
    Filters f{};
    if (p.has_top_k) f.top_k = top_k_of(p.top_k.get_integer(output, row), p.vocab_size);
    f.top_p = p.has_top_p ? p.top_p.get_real(output, row) : 1.0;
    f.min_p = p.has_min_p ? p.min_p.get_real(output, row) : 0.0;
    f.has_top_p = !(f.top_p >= 1), f.has_min_p = !(f.min_p <= 0), f.top_k_first = p.top_k_first;
    return f;
  }
  bool valid() const { return top_p == top_p && min_p == min_p; }
  bool operator==(const Filters& o) const {
    return top_k.on == o.top_k.on && top_k.k == o.top_k.k && top_p == o.top_p && min_p == o.min_p;
  }
};

inline float min_p_threshold(const Row& row, double min_p) {
  const float maximum = *std::max_element(row.maxima.begin(), row.maxima.end());
  return min_p >= 1 ? maximum : static_cast<float>(min_p) * maximum;
}

inline float rounded(float x, DType dtype) {
  if (dtype == DType::kFloat16) return to_float(from_float<half_t>(x));
  return dtype == DType::kBFloat16 ? to_float(from_float<bfloat16_t>(x)) : x;
}

// Replace kept elements by x / sum(kept), as top_k_renorm_probs does.
inline void renormalize(Row& row, float threshold, const Mass& of_row, std::vector<float>& sums, DType dtype) {
  sum_kept(row, threshold, sums);
  const Normalizer by = Normalizer::of(Mass::of(sums, of_row.fixed).real());
  rewrite(row, [&](vfloat x) {
    vfloat y = normalized(kept(x, threshold), by);
    if (dtype != DType::kFloat32)
      for (int lane = 0; lane < kLanes; ++lane) y[lane] = rounded(y[lane], dtype);
    return y;
  });
}

inline void apply(const Filters& f, DType dtype, Drawable& d) {
  Mass mass = Mass::of(d.row.sums);
  if (!mass.valid || !f.valid()) return void(d.mass = {});
  float t = f.has_min_p ? min_p_threshold(d.row, f.min_p) : 0.0f;
  if (f.top_k.on) t = std::max(t, top_k_threshold(d.row, f.top_k.k, d.buffer, 0));
  if (f.has_top_p) {
    if (f.top_k.on && f.top_k_first) {
      renormalize(d.row, t, mass, d.sums, dtype);
      mass = Mass::of(d.row.sums), t = 0;
    }
  }
  if (t > 0 || !f.has_top_p) sum_kept(d.row, t, d.sums);
  // The other filters decide if they leave no more than p.
  if (f.has_top_p && (t == 0 || Mass::of(d.sums, mass.fixed).real() >= f.top_p * mass.real()))
    t = top_p_threshold(d.row, mass, f.top_p, d.sums, d.buffer, t);
  d.threshold = t;
  d.finish(mass);
}

inline void put(void* to, bool wide, int64_t at, int64_t value) {
  wide ? void(static_cast<int64_t*>(to)[at] = value)
       : void(static_cast<int32_t*>(to)[at] = static_cast<int32_t>(value));
}

// Load a row and prepare it for draws.
inline void prepare(const SampleParams& p, const Source& from, double temperature, const Filters& filters,
                    Drawable& d) {
  d.threshold = 0;
  if (!p.filters()) {
    if (p.is_logits) {
      load_exponentials(d.row, from, temperature);
      d.sums = d.row.sums;
    } else {
      sum_probs(d.sums, from);
    }
    return d.finish(Mass::of(d.sums));
  }
  if (!p.is_logits) load_probs(d.row, from);
  Filters rest = filters;
  if (p.is_logits && filters.top_k.on && filters.top_k_first) {
    // top_k masks logits before they become probabilities.
    load_elements(d.row, from);
    const float least = top_k_threshold(d.row, filters.top_k.k, d.buffer, -INFINITY);
    rest.top_k = {};
    if (!softmax_from(d.row, least, temperature)) return void(d.mass = {});
  } else if (p.is_logits && !load_softmax(d.row, from, temperature)) {
    return void(d.mass = {});
  }
  apply(rest, p.is_logits ? DType::kFloat32 : from.dtype, d);
}

inline int64_t draw(const SampleParams& p, int64_t output, const Source& from, const Drawable& d) {
  if (!d.mass.valid) return 0;
  const auto [c, share] = d.find(p.random.draw(output, 0));
  float buffer[kSumChunk];
  const float* x = p.filters() || p.is_logits ? d.row.chunk(c) : from.chunk(c, 0.0f, buffer);
  return c * kSumChunk + find_in_chunk(x, from.count(c), share, d.mass.fixed, d.threshold);
}

inline int64_t integer_at(const RowsOf& list, int64_t i) {
  return list.dtype == DType::kInt64 ? static_cast<const int64_t*>(list.data)[i * list.stride]
                                     : static_cast<const int32_t*>(list.data)[i * list.stride];
}

inline void sample_rows(const SampleParams& p, const Format& format) {
  const int64_t bytes = p.indices.data ? 64 : p.vocab_size * format.size;
  parallel_rows(p.num_outputs, bytes, [&](int64_t first, int64_t last) {
    Drawable& d = own_drawable();
    Filters filters{};
    int64_t loaded = -1;
    for (int64_t i = first; i < last; ++i) {
      const int64_t r = p.indices.data ? integer_at(p.indices, i) : i;
      const Filters next = Filters::of(p, i, r);
      const Source from = Source::of(p.input, r * p.input.stride, format, p.vocab_size);
      if (r != loaded || !(next == filters)) {
        prepare(p, from, p.temperature.get_real(i, r), next, d);
        loaded = r, filters = next;
      }
      put(p.samples, p.wide_samples, i, draw(p, i, from, d));
      p.valid[i] = d.mass.valid;
    }
  });
}

inline void softmax(const Source& from, double temperature, float* to, std::vector<float>& sums) {
  float last[kSumChunk];  // elements of an incomplete chunk
  exponentials(from, temperature, sums,
               [&](int64_t c) { return from.count(c) == kSumChunk ? to + c * kSumChunk : last; });
  const Mass mass = Mass::of(sums);
  if (!mass.valid) return void(std::fill(to, to + from.n, NAN));
  const Normalizer by = Normalizer::of(mass.real());
  const int64_t whole = from.n / kSumChunk * kSumChunk;
  for (int64_t i = 0; i < whole; i += kLanes) store(to + i, normalized(load(to + i), by));
  for_lanes(from.n - whole,
            [&](int64_t i, int lanes) { store(to + whole + i, normalized(load(last + i, lanes), by), lanes); });
}

// Write change(x) of a row to output row r. A chunk whose elements are all below t becomes change(below).
template <typename F>
inline void write_changed(const MapRowsParams& p, int64_t r, const Source& from, const Row& row, float t, float below,
                          const F& change) {
  float buffer[kSumChunk];
  bool is_below = false;  // the buffer holds change(below)
  float* output = from.dtype == DType::kFloat32 ? static_cast<float*>(p.output) + r * p.vocab_size : nullptr;
  for (int64_t c = 0; c < row.chunks(); ++c) {
    const bool reaches = !(row.maxima[c] < t), stays = output && from.count(c) == kSumChunk;
    const float* at = row.chunk(c);
    float* to = stays ? output + c * kSumChunk : buffer;
    if (reaches) {
      for (int i = 0; i < kSumChunk; i += kLanes) store(to + i, change(load(at + i)));
    } else if (stays || !is_below) {
      std::fill_n(to, kSumChunk, change(splat(below))[0]);
    }
    if (stays) continue;
    is_below = !reaches;
    from.format->write(p.output, r * p.vocab_size + c * kSumChunk, from.count(c), buffer);
  }
}

inline void renorm(const MapRowsParams& p, int64_t r, const Source& from, Drawable& d) {
  load_probs(d.row, from);
  const Mass mass = Mass::of(d.row.sums);
  const double top_p = p.map == RowMap::kTopPRenorm ? p.parameter.get_real(r, r) : 1.0;
  const TopK top_k = p.map == RowMap::kTopKRenorm ? top_k_of(p.parameter.get_integer(r, r), p.vocab_size) : TopK{};
  if (!mass.valid || top_p != top_p) {
    bool zeros = top_p == top_p;
    for (const float sum : d.row.sums) zeros &= sum == 0;
    const float value = zeros ? 0.0f : NAN;
    return write_changed(p, r, from, d.row, 0, 0, [&](vfloat) { return splat(value); });
  }
  float t = top_k.on ? top_k_threshold(d.row, top_k.k, d.buffer, 0) : 0.0f;
  if (top_p >= 1) {
    sum_kept(d.row, t, d.sums);
  } else {
    t = top_p_threshold(d.row, mass, top_p, d.sums, d.buffer);
  }
  const Normalizer by = Normalizer::of(Mass::of(d.sums, mass.fixed).real());
  write_changed(p, r, from, d.row, t, 0, [&](vfloat x) { return normalized(kept(x, t), by); });
}

inline void mask(const MapRowsParams& p, int64_t r, const Source& from, Drawable& d) {
  load_elements(d.row, from);
  const TopK top_k = top_k_of(p.parameter.get_integer(r, r), p.vocab_size);
  const float t = top_k.on ? top_k_threshold(d.row, top_k.k, d.buffer, -INFINITY) : -INFINITY;
  write_changed(p, r, from, d.row, d.row.has_nan ? -INFINITY : t, -INFINITY,
                [&](vfloat x) { return select(x < t, splat(-INFINITY), x); });
}

inline void map_rows(const MapRowsParams& p, const Format& format) {
  parallel_rows(p.num_rows, p.vocab_size * format.size, [&](int64_t first, int64_t last) {
    Drawable& d = own_drawable();
    for (int64_t r = first; r < last; ++r) {
      const Source from = Source::of(p.input, r * p.input.stride, format, p.vocab_size);
      if (p.map == RowMap::kSoftmax) {
        softmax(from, p.parameter.get_real(r, r), static_cast<float*>(p.output) + r * p.vocab_size, d.sums);
      } else if (p.map == RowMap::kTopKMask) {
        mask(p, r, from, d);
      } else {
        renorm(p, r, from, d);
      }
    }
  });
}

}  // namespace flashinfer::cpu
