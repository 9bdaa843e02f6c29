// Draws without filters from rows whose chunk sums do not fit into shared memory.
//
// A segment is a run of adjacent chunks. One warp of the cluster computes its chunk sums, again in each pass.
// The passes find the largest logit, the largest chunk sum, the total of each segment, and the chunk of a
// draw. Totals are integers, so the split into segments changes no bit: the draws are those of
// unfiltered.cuh.
#pragma once

#include <flashinfer/cuda/sampling/launch.cuh>
#include <flashinfer/cuda/sampling/rows.cuh>

namespace flashinfer::cuda {

struct Segments {
  // A GlobalRow whose chunks are segments, for broadcasts. sums() has a word per segment: its maximum, then
  // its largest sum, then the low half of its total. maxima() has the high half.
  GlobalRow words;
  int chunks, chunks_per_segment;
  bool is_logits;
  float top, scale;  // of exp((l - top) * scale)

  __device__ static Segments of(int64_t n, bool is_logits) {
    Segments s{};
    s.words = GlobalRow::of(int64_t{ptx::cluster_size()} * kSegmentWarps * kSumChunk);
    s.chunks = static_cast<int>(num_chunks(n)), s.chunks_per_segment = (s.chunks + s.words.chunks - 1) / s.words.chunks;
    s.is_logits = is_logits;
    return s;
  }

  __device__ __forceinline__ int own_segment() const { return words.first + words.warp(); }

  // Call f(first chunk, second chunk, number of the first, has_second) for the chunks of a segment.
  template <typename F>
  __device__ __forceinline__ void for_chunk_pairs(int segment, const F& f) const {
    const Source source = scratch().source;
    const float padding = is_logits ? -INFINITY : 0.0f;
    const int from = segment * chunks_per_segment, to = min(from + chunks_per_segment, chunks);
    for (int c = from; c < to; c += 2) {
      const bool has_second = c + 1 < to;
      Chunk first, second;
      source.load(first, int64_t{c} * kSumChunk, padding);
      if (has_second) {
        source.load(second, int64_t{c + 1} * kSumChunk, padding);
      } else {
        second.for_each([=](float& x) { x = padding; });
      }
      f(first, second, c, has_second);
    }
  }

  // Call f(c, sum) for each chunk number c of a segment. All lanes have the sum.
  template <typename F>
  __device__ __forceinline__ void for_sums(int segment, const F& f) const {
    for_chunk_pairs(segment, [&](Chunk& first, Chunk& second, int c, bool has_second) {
      float sum;
      if (is_logits) {
        const PairSums pair = exponentials_of(first, second, scale);
        sum = pair.sum;
        if (sum != 0) sum *= ptx::ex2_approx((pair.maximum - top) * scale);
      } else {
        sum = pair_sum(first, second, [](float x) { return max_nan(x, 0.0f); });
      }
      f(c, __shfl_sync(kAllLanes, sum, 0));
      const float other = __shfl_sync(kAllLanes, sum, 16);
      if (has_second) f(c + 1, other);
    });
  }

  // Passes are separate functions, because each needs all registers.
  __device__ __noinline__ static void maxima_pass(Segments s) {
    float maximum = -INFINITY;
    s.words.begin_pass(s.words.chunks);
    s.for_chunk_pairs(s.own_segment(), [&](const Chunk& first, const Chunk& second, int, bool) {
      maximum = max_nan(maximum, pair_max<true>(first, second));
    });
    maximum = max_nan(maximum, __shfl_xor_sync(kAllLanes, maximum, 16));
    s.words.broadcast(s.words.sums() + s.own_segment(), maximum);
    s.words.end_pass();
  }
  __device__ __noinline__ static void largest_sums_pass(Segments s) {
    uint32_t largest = 0;  // the bits of a NaN exceed all others
    s.words.begin_pass(s.words.chunks);
    s.for_sums(s.own_segment(), [&](int, float sum) { largest = max(largest, __float_as_uint(sum)); });
    s.words.broadcast(s.words.sums() + s.own_segment(), __uint_as_float(largest));
    s.words.end_pass();
  }
  __device__ __noinline__ static void totals_pass(Segments s, FixedPoint fixed) {
    uint64_t total = 0;
    s.words.begin_pass(2 * s.words.chunks);
    s.for_sums(s.own_segment(), [&](int, float sum) { total += fixed(sum); });
    s.words.broadcast(s.words.sums() + s.own_segment(), __uint_as_float(static_cast<uint32_t>(total)));
    s.words.broadcast(s.words.maxima() + s.own_segment(), __uint_as_float(static_cast<uint32_t>(total >> 32)));
    s.words.end_pass();
  }

  __device__ __forceinline__ uint64_t total_of(int segment) const {
    return uint64_t{__float_as_uint(words.maxima()[segment])} << 32 | __float_as_uint(words.sums()[segment]);
  }

  // Return the totals of the row, and keep those of its segments.
  __device__ __forceinline__ Totals totals(double temperature) {
    if (is_logits) {
      words.sums_buffer ^= 1;
      maxima_pass(*this);
      ++words.pass;
      top = largest_of(words.sums(), words.chunks), scale = exponent_scale(temperature);
      set_scratch([&](Scratch& s) {
        s.remap.is_exponential = true, s.remap.least = -INFINITY, s.remap.scale = scale, s.remap.top = top;
      });
    }
    words.sums_buffer ^= 1;
    largest_sums_pass(*this);
    ++words.pass;
    const uint32_t largest = GlobalRow::largest_bits(words.sums(), words.chunks);
    Totals totals{FixedPoint::of(__uint_as_float(largest)), 0, largest != 0 && largest <= 0x7f7fffffu};
    if (!totals.valid) return totals;
    words.sums_buffer ^= 1, words.maxima_buffer ^= 1;
    totals_pass(*this, totals.fixed);
    ++words.pass;
    for (int i = 0; i < words.chunks; ++i) totals.total += total_of(i);
    return totals;
  }

  // Draw one element of `row` by one uniform number. All lanes of a warp call this.
  __device__ __noinline__ static int64_t draw(Segments s, ChunkDraw<false> row, uint64_t uniform) {
    if (!row.totals.valid) return 0;
    uint64_t share = share_of(uniform, row.totals.total);
    int segment = 0, chunk = -1;
    for (uint64_t one; (one = s.total_of(segment)) <= share; ++segment) share -= one;
    s.for_sums(segment, [&](int c, float sum) {
      if (chunk >= 0) return;
      const uint64_t one = row.totals.fixed(sum);
      if (one > share) {
        chunk = c;
      } else {
        share -= one;
      }
    });
    return row.find_in_chunk(chunk, share);
  }
};

__global__ void __launch_bounds__(kSegmentWarps * 32, 1)
    segments_kernel(const __grid_constant__ SampleParams p, int64_t outputs_per_cluster) {
  Segments segments = Segments::of(p.vocab_size, p.is_logits);
  const auto prepare = [&](GlobalRow&, const Filters& f, Totals& totals) {
    totals = segments.totals(f.temperature);
    return 0.0f;
  };
  const auto draw = [&](const GlobalRow& cluster_row, int64_t first, int64_t end, const Totals& totals, float) {
    for (int64_t output = first + cluster_row.rank * cluster_row.warps() + cluster_row.warp(); output < end;
         output += cluster_row.size * cluster_row.warps()) {
      const int64_t token = Segments::draw(segments, {cluster_row, totals, 0.0f}, p.random.draw(output, 0));
      if (lane_id() == 0) write_sample(p, output, token, totals.valid);
    }
  };
  sample_outputs<false>(p, outputs_per_cluster, prepare, draw);
}

}  // namespace flashinfer::cuda
