// Softmax, filters, samples, verification of drafts and the k largest.
#include <flashinfer/cpu/sampling/chain.h>
#include <flashinfer/cpu/sampling/sample.h>
#include <flashinfer/cpu/sampling/top_k.h>

#include <functional>
#include <numeric>

#include "harness.h"

using namespace driver;

constexpr int64_t kRows = 7;

// One value for all outputs, or one for each.
PerRow all_real(double number) { return {nullptr, DType::kFloat64, 0, 0, number, 0}; }
PerRow all_integer(int64_t number) { return {nullptr, DType::kInt64, 0, 0, 0, number}; }
PerRow each(const std::vector<float>& numbers) { return {numbers.data(), DType::kFloat32, 0, 1, 0, 0}; }
PerRow each(const std::vector<int32_t>& numbers) { return {numbers.data(), DType::kInt32, 0, 1, 0, 0}; }

Random random_numbers() { return {all_integer(engine()), all_integer(drawn_int(0, 1 << 30)), {}, false}; }

double uniform(const Random& random, int64_t output, uint32_t number) {
  return static_cast<double>(random.draw(output, number)) * 0x1p-53;
}

// Unnormalised rows of probabilities: some are 0, and one has most of the mass.
template <typename T>
std::vector<T> probabilities(int64_t n) {
  auto x = drawn<T>(kRows * n);
  for (int64_t i = 0; i < kRows * n; ++i) set(x[i], drawn_int(0, 9) ? std::fabs(value(x[i])) : 0.0);
  for (int64_t row = 0; row < kRows; ++row) set(x[row * n + drawn_int(0, static_cast<int>(n) - 1)], 3.0);
  return x;
}

template <typename T>
std::vector<double> row_of(const std::vector<T>& x, int64_t row, int64_t n) {
  std::vector<double> result(n);
  for (int64_t i = 0; i < n; ++i) result[i] = value(x[row * n + i]);
  return result;
}

double sum_of(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

std::vector<double> descending(std::vector<double> x) {
  std::sort(x.begin(), x.end(), std::greater<>());
  return x;
}

std::vector<double> above(std::vector<double> x, double threshold) {
  for (double& one : x) one = one >= threshold ? one : 0;
  return x;
}

// A value of the row and a p with it as threshold under any rounding: half of its mass is a margin.
std::pair<double, float> top_p_of(const std::vector<double>& x) {
  const auto sorted = descending(x);
  const double t = sorted[drawn_int(0, static_cast<int>(std::min<size_t>(sorted.size(), 12)) - 1)];
  double more = 0, same = 0;
  for (const double one : x) more += one > t ? one : 0, same += one == t ? one : 0;
  return {t, static_cast<float>((more + same / 2) / sum_of(x))};
}

// Return the distance of u * sum(x) from the interval of `got`: a sample is the smallest i with sum(x_j, j <=
// i) > u * sum(x).
void check_sample(const char* what, int64_t at, int64_t got, const std::vector<double>& x, double u) {
  const bool inside = got >= 0 && got < static_cast<int64_t>(x.size()) && x[got] > 0;
  double distance = 1;
  if (inside) {
    const double before = std::accumulate(x.begin(), x.begin() + got, 0.0), total = sum_of(x);
    distance = std::max({0.0, before - u * total, u * total - before - x[got]}) / total;
  }
  check(what, at, distance, 0, 4e-6);
}

template <typename T>
void softmax(int64_t n) {
  const auto logits = drawn<T>(kRows * n, 3);
  const std::vector<float> temperatures{1, 0.5f, 2, 0.1f, 7, 1.5f, 0.9f};
  auto output = unwritten<float>(kRows * n);
  MapRowsParams p{RowMap::kSoftmax, {logits.data(), n, kType<T>}, output.data(), kRows, n, each(temperatures)};
  cpu::map_rows(p, cpu::Format::of<T>());
  for (int64_t row = 0; row < kRows; ++row) {
    auto want = row_of(logits, row, n);
    const double top = *std::max_element(want.begin(), want.end());
    for (double& one : want) one = std::exp((one - top) / temperatures[row]);
    const double total = sum_of(want);
    for (int64_t i = 0; i < n; ++i)
      check("softmax", row * n + i, output[row * n + i], want[i] / total, 2e-5 * want[i] / total + 1e-12);
  }
}

template <typename T>
void renorm(int64_t n, bool top_p) {
  const auto x = probabilities<T>(n);
  std::vector<float> ps(kRows);
  std::vector<int32_t> ks(kRows);
  std::vector<double> thresholds(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    const auto one = row_of(x, row, n);
    ks[row] = drawn_int(1, static_cast<int>(n));
    if (top_p) {
      std::tie(thresholds[row], ps[row]) = top_p_of(one);
    } else {
      thresholds[row] = descending(one)[ks[row] - 1];
    }
  }
  auto output = unwritten<T>(kRows * n);
  MapRowsParams p{top_p ? RowMap::kTopPRenorm : RowMap::kTopKRenorm,
                  {x.data(), n, kType<T>},
                  output.data(),
                  kRows,
                  n,
                  top_p ? each(ps) : each(ks)};
  cpu::map_rows(p, cpu::Format::of<T>());
  for (int64_t row = 0; row < kRows; ++row) {
    const auto want = above(row_of(x, row, n), thresholds[row]);
    const double total = sum_of(want);
    for (int64_t i = 0; i < n; ++i)
      check_rounded(top_p ? "top_p" : "top_k", row * n + i, output[row * n + i], want[i] / total, 1e-6,
                    want[i] / total);
  }
}

template <typename T>
void largest(int64_t n, int64_t k) {
  const auto x = drawn<T>(kRows * n);
  auto masked = unwritten<T>(kRows * n), values = unwritten<T>(kRows * k);
  std::vector<int64_t> indices(kRows * k, -1);
  MapRowsParams mask{RowMap::kTopKMask, {x.data(), n, kType<T>}, masked.data(), kRows, n, all_integer(k)};
  cpu::map_rows(mask, cpu::Format::of<T>());
  TopKParams top{{x.data(), n, kType<T>}, kRows, n, k, values.data(), indices.data()};
  cpu::top_k_rows(top, cpu::Format::of<T>());
  for (int64_t row = 0; row < kRows; ++row) {
    const auto one = row_of(x, row, n);
    const double t = descending(one)[k - 1];
    int64_t more = 0, found = 0;
    for (const double number : one) more += number > t;
    for (int64_t i = 0, ties = k - more; i < n; ++i) {
      check("mask", row * n + i, value(masked[row * n + i]), one[i] >= t ? one[i] : -INFINITY, 0);
      if (one[i] < t || (one[i] == t && ties-- <= 0)) continue;
      check("index", row * k + found, static_cast<double>(indices[row * k + found]), static_cast<double>(i), 0);
      check("value", row * k + found, value(values[row * k + found]), one[i], 0);
      ++found;
    }
  }
}

template <typename T>
void samples(int64_t n, bool is_logits, bool filtered, bool wide) {
  constexpr int64_t kOutputs = 40;
  auto x = is_logits ? drawn<T>(kRows * n, 2) : probabilities<T>(n);
  set(x[(kRows - 1) * n + n / 2], NAN);  // the last row is invalid
  std::vector<int32_t> of_output(kOutputs), samples(2 * kOutputs, -1);
  for (int32_t& row : of_output) row = drawn_int(0, kRows - 1);
  std::sort(of_output.begin(), of_output.end());
  std::vector<std::vector<double>> kept;
  std::vector<float> ps(kRows);
  std::vector<int32_t> ks(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    auto one = row_of(x, row, n);
    if (is_logits) {
      const double top = *std::max_element(one.begin(), one.end());
      for (double& number : one) number = std::exp((number - top) / 0.75);
    }
    double t = 0;
    if (filtered && row < kRows - 1) {
      // Expected thresholds lie halfway between two values, because the kernels round theirs to float.
      const auto sorted = descending(one);
      std::tie(t, ps[row]) = top_p_of(one);
      ks[row] = drawn_int(1, static_cast<int>(n));
      t = std::max({t, sorted[ks[row] - 1], sorted[0] * 0.05}) * (1 - 1e-5);
    }
    kept.push_back(above(one, t));
  }
  bool valid[kOutputs];
  SampleParams p{};
  p.input = {x.data(), n, kType<T>}, p.is_logits = is_logits, p.vocab_size = n;
  p.num_rows = kRows, p.num_outputs = kOutputs, p.temperature = all_real(0.75);
  p.has_top_k = p.has_top_p = p.has_min_p = filtered;
  p.top_k = each(ks), p.top_p = each(ps), p.min_p = all_real(0.05);
  p.indices = {of_output.data(), 1, DType::kInt32}, p.random = random_numbers();
  p.samples = samples.data(), p.wide_samples = wide, p.valid = valid;
  cpu::sample_rows(p, cpu::Format::of<T>());
  for (int64_t i = 0; i < kOutputs; ++i) {
    const int64_t row = of_output[i];
    int64_t got = samples[i];
    if (wide) std::memcpy(&got, &samples[2 * i], sizeof(got));
    check("valid", i, valid[i], row < kRows - 1, 0);
    if (row == kRows - 1) {
      check("no sample", i, static_cast<double>(got), 0, 0);
    } else {
      check_sample("sample", i, got, kept[row], uniform(p.random, i, 0));
    }
  }
}

template <typename T>
void chain(int64_t n, int64_t drafted) {
  std::vector<T> draft, target;
  for (int64_t i = 0; i < drafted; ++i)
    for (const T one : probabilities<T>(n)) draft.push_back(one);
  for (int64_t i = 0; i <= drafted; ++i)
    for (const T one : probabilities<T>(n)) target.push_back(one);
  std::vector<int32_t> ids(kRows * drafted), tokens(kRows * (drafted + 1), -7), accepted(kRows, 5);
  std::vector<int64_t> emitted(kRows, 9);
  for (int32_t& id : ids) id = drawn_int(0, static_cast<int>(n) - 1);
  ChainParams p{};
  p.draft = {draft.data(), n, kType<T>}, p.target = {target.data(), n, kType<T>};
  p.draft_batch_stride = drafted * n, p.target_batch_stride = (drafted + 1) * n;
  p.draft_ids = {ids.data(), drafted, DType::kInt32};
  p.batch_size = kRows, p.num_draft = drafted, p.vocab_size = n, p.random = random_numbers();
  p.tokens = tokens.data(), p.accepted = accepted.data(), p.emitted = emitted.data(), p.wide_emitted = true;
  cpu::chain_sample(p, cpu::Format::of<T>());
  for (int64_t b = 0; b < kRows; ++b) {
    int64_t passed = 0, first = drafted;
    for (int64_t j = 0; j < drafted; ++j) {
      const int64_t id = ids[b * drafted + j];
      const double u = uniform(p.random, b, static_cast<uint32_t>(1 + j));
      const bool passes =
          u * value(draft[(b * drafted + j) * n + id]) < value(target[(b * (drafted + 1) + j) * n + id]);
      passed += passes;
      if (!passes) first = std::min(first, j);
    }
    check("accepted", b, accepted[b], static_cast<double>(5 + passed), 0);
    check("emitted", b, static_cast<double>(emitted[b]), static_cast<double>(9 + first), 0);
    const int32_t* got = &tokens[b * (drafted + 1)];
    for (int64_t j = 0; j <= drafted; ++j)
      if (j != first) check("token", j, got[j], j < first ? ids[b * drafted + j] : -1, 0);
    const auto whole = row_of(target, b * (drafted + 1) + first, n);
    auto left = whole;
    if (first < drafted)
      for (int64_t i = 0; i < n; ++i) left[i] = std::max(0.0, left[i] - value(draft[(b * drafted + first) * n + i]));
    if (sum_of(left) == 0) left = whole;
    check_sample("drawn", b, got[first], left, uniform(p.random, b, 0));
  }
}

void random_blocks() {
  // Known answers published by the authors.
  const PhiloxBlock zeros = philox4x32_10({{0, 0, 0, 0}}, 0, 0);
  const uint32_t wanted[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  for (int word = 0; word < 4; ++word) check("philox", word, zeros.words[word], wanted[word], 0);
}

template <typename T>
void of_type() {
  for (const int64_t n : {3, 512, 1300}) {
    softmax<T>(n), renorm<T>(n, false), renorm<T>(n, true), largest<T>(n, n), largest<T>(n, n / 3);
    for (const bool filtered : {false, true})
      samples<T>(n, true, filtered, true), samples<T>(n, false, filtered, false);
    chain<T>(n, 4);
  }
}

void run() {
  random_blocks();
  of_type<float>(), of_type<half_t>(), of_type<bfloat16_t>();
}
