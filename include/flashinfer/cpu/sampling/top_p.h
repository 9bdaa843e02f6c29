// Threshold of top-p on the CPU: the largest v whose elements >= v hold a share p of the mass.
#pragma once

#include <flashinfer/cpu/sampling/select.h>

namespace flashinfer::cpu {

constexpr Edge kNoEdge{0, 0};
// Smallest element that counts: a chunk whose sum is 0 may have any elements.
constexpr float kMinNumber = 0x1p-149f;

// Return the threshold of a row that keeps much, or kNoEdge. A sample of each chunk gives two numbers that
// probably bound it: three standard deviations of the sample's share on both sides of p. One pass sums the
// elements above them and gathers those between.
inline Edge top_p_between(const Row& row, double target, double p, Floats& buffer) {
  const int64_t samples = row.chunks() * kLanes;
  if (row.n < 64 * kSumChunk) return kNoEdge;
  float* sample = buffer.data();
  vfloat sums{}, squares{};
  for (int64_t c = 0; c < row.chunks(); ++c) {
    if (row.sums[c] == 0) return kNoEdge;
    const vfloat x = load(row.chunk(c) + c * kLanes % kSumChunk);
    store(sample + c * kLanes, x);
    sums += x, squares += x * x;
  }
  const double total = sum(sums),
               spread = (1 - p) * (1 - p) * sum(squares) / (total * total) + 0.3 * p * p * (1 - p) / samples;
  const double apart = 3 * std::sqrt(spread);
  if (!(apart < std::min(p, 1 - p) / 4)) return kNoEdge;  // peaked
  float* other = sample + samples + kLanes;
  std::copy(sample, sample + samples, other);
  const float high = select_threshold<true>(other, samples, (p - apart) * total, total, 0.0f).value;
  const float low = select_threshold<true>(sample, samples, (p + apart) * total, total, 0.0f).value;
  double above = 0;
  int64_t count = 0;
  float* to = buffer.data();
  for (int64_t c = 0; c < row.chunks(); ++c) {
    if (row.maxima[c] < low || row.sums[c] == 0) continue;
    const float* at = row.chunk(c);
    vfloat sums[2]{};
    for (int i = 0; i < kSumChunk; i += 2 * kLanes) {
      const vfloat x[2] = {load(at + i), load(at + i + kLanes)};
      for (int k = 0; k < 2; ++k) {
        sums[k] += select(x[k] > high, x[k], vfloat{});
        count += append_within(to + count, x[k], low, high);
      }
    }
    above += lane_sum(sums[0] + sums[1]);
  }
  if (above >= target) return kNoEdge;
  const double between = measure<true>(buffer.data(), count, INFINITY, low).at_least;
  if (above + between < target) return kNoEdge;
  return select_threshold<true>(buffer.data(), count, target - above, between, low);
}

// Return the threshold of a row that keeps little, or kNoEdge. Elements that reach half of the chunks' maxima
// may suffice.
inline Edge top_p_from_maxima(const Row& row, double target, Floats& buffer) {
  double sum = 0;
  for (const float maximum : row.maxima) sum += maximum;
  if (row.chunks() < 2 || sum < target / 4) return kNoEdge;
  std::copy(row.maxima.begin(), row.maxima.end(), buffer.begin());
  const auto middle = buffer.begin() + row.chunks() / 2;
  std::nth_element(buffer.begin(), middle, buffer.begin() + row.chunks());
  const int64_t count = gather_within(row, std::max(*middle, kMinNumber), INFINITY, buffer);
  const double all = measure<true>(buffer.data(), count, INFINITY, 0).at_least;
  return all < target ? kNoEdge : select_threshold<true>(buffer.data(), count, target, all, 0.0f);
}

// Return about the largest v with sum(x >= v) >= p * S if it is `least` or more. Sums have an order of their
// own.
inline Edge top_p_nearly(const Row& row, const Mass& mass, double p, double target, Floats& buffer, float least) {
  Edge edge = least > 0 ? kNoEdge : top_p_between(row, target, p, buffer);
  if (edge.count == 0 && !(least > 0)) edge = top_p_from_maxima(row, target, buffer);
  if (edge.count > 0) return edge;
  // All smaller elements together hold less than the share that may be missing.
  const float low = std::nextafter(static_cast<float>((1 - p) * mass.real() / static_cast<double>(row.n)) * 0.999f, 0);
  const int64_t count = gather_within(row, std::max({low, least, kMinNumber}), INFINITY, buffer);
  const double all = least > low ? measure<true>(buffer.data(), count, INFINITY, 0).at_least : mass.real();
  return select_threshold<true>(buffer.data(), count, target, all, 0.0f);
}

// Refine `edge`, which is the threshold or near it, by the sums of common/fixed_sum.h. `sums` become those of
// kept elements. Nonnegative floats are ordered as their bits.
inline float refine_threshold(const Row& row, FixedPoint fixed, double target, Edge edge, std::vector<float>& sums,
                              Floats& buffer) {
  const auto as_float = [](uint32_t bits) { return bit_cast<float>(bits); };
  const auto from = [&](float t) {
    sum_kept(row, t, sums);
    return Mass::of(sums, fixed).real();
  };
  // Invariant: elements >= `low` suffice, elements >= `high` do not.
  const uint32_t end = bit_cast<uint32_t>(*std::max_element(row.maxima.begin(), row.maxima.end())) + 1;
  uint32_t low = 1, high = end;
  double above = 0;
  for (float apart = 0x1p-8f;; apart *= 8) {
    const float t = std::max(edge.value, as_float(low));
    const uint32_t bits = bit_cast<uint32_t>(t);
    if (const double kept = from(t); kept < target) {
      high = bits, above = kept;
    } else {
      low = bits;
      if (high - low == 1 || is_threshold(kept, static_cast<double>(edge.count) * t, t, target, fixed)) return t;
      const double more = from(as_float(bits + 1));
      if (more < target) {
        from(t);
        return t;
      }
      low = bits + 1;
    }
    // A little above a key that is too low; below one that is too high, by the missing sum.
    edge = {as_float(low + (high - low) / 2), 0};
    if (apart > 1) continue;
    if (high == end) {
      edge.value = std::min(as_float(low) * (1 + apart), as_float(high - 1));
      continue;
    }
    edge.value = std::max(as_float(low), as_float(high) * (1 - apart));
    const int64_t count = gather_within(row, edge.value, as_float(high - 1), buffer);
    const double all = measure<true>(buffer.data(), count, INFINITY, 0).at_least;
    if (above + all >= target) edge = select_threshold<true>(buffer.data(), count, target - above, all, edge.value);
  }
}

// Return the largest v with sum(x >= v) >= p * S if it is `least` or more. `sums` become those of kept
// elements.
inline float top_p_threshold(const Row& row, const Mass& mass, double p, std::vector<float>& sums, Floats& buffer,
                             float least = 0) {
  const double target = p * mass.real();
  if (!(target > 0)) {
    const float maximum = *std::max_element(row.maxima.begin(), row.maxima.end());
    sum_kept(row, maximum, sums);
    return maximum;
  }
  buffer.resize(row.x.size() + kLanes);
  return refine_threshold(row, mass.fixed, target, top_p_nearly(row, mass, p, target, buffer, least), sums, buffer);
}

}  // namespace flashinfer::cpu
