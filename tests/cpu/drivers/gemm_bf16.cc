// bfloat16 products in pairs, at levels that have them: rows with columns, and with rows.
#include <flashinfer/cpu/simd/gemm_bf16.h>

#include "harness.h"

using namespace driver;
using cpu::kGemmRows, cpu::kLanes, cpu::kPanel, cpu::kPanelVectors, cpu::Sums;

constexpr int kStride = 200;  // distance of the left rows

template <typename T>
void check_products(const char* what, int depth, const std::vector<bfloat16_t>& a, const std::vector<T>& b,
                    int64_t b_row, int64_t b_column, const std::vector<float>& got, const std::vector<double>& from) {
  for (int row = 0; row < kGemmRows; ++row) {
    for (int column = 0; column < kPanel; ++column) {
      double want = from[row * kPanel + column];
      for (int k = 0; k < depth; ++k) want += value(a[row * kStride + k]) * value(b[k * b_row + column * b_column]);
      check(what, row * kPanel + column, got[row * kPanel + column], want, 2e-5);
    }
  }
}

// kPanel keys of kDepth numbers.
template <int kDepth, typename T>
void run_columns(const std::vector<bfloat16_t>& a) {
  const auto keys = drawn<T>(kPanel * kDepth);
  auto panel = unwritten<bfloat16_t>(kDepth * kPanel);
  for (int t = 0; t < kPanel; t += kLanes) {
    const T* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = &keys[(t + i) * kDepth];
    cpu::pack_column_pairs<kDepth>(rows, &panel[2 * t]);
  }
  auto c = unwritten<float>(kGemmRows * kPanel);
  const float one = 1;
  cpu::multiply_pairs<kGemmRows, kPanelVectors, kStride, kPanel, Sums::kSet>(kDepth, a.data(), panel.data(), c.data(),
                                                                             &one);
  check_products("columns", kDepth, a, keys, 1, kDepth, c, std::vector<double>(c.size()));
}

// After an odd number of rows the panel may hold anything.
template <typename T>
void run_rows(const std::vector<bfloat16_t>& a, T nan) {
  for (const int depth : {1, 2, 37, 64}) {
    auto rows = drawn<T>((depth + 1) * kPanel);
    if (depth % 2) std::fill(rows.end() - kPanel, rows.end(), nan);
    auto pairs = unwritten<bfloat16_t>((depth + 1) * kPanel);
    for (int t = 0; t < depth; t += 2)
      cpu::pack_row_pairs<kPanel>(&rows[t * kPanel], &rows[(t + 1) * kPanel], &pairs[t * kPanel], 0);
    auto sums = drawn<float>(kGemmRows * kPanel);
    const auto factor = drawn<float>(kGemmRows);
    std::vector<double> scaled(sums.size());
    for (size_t i = 0; i < sums.size(); ++i) scaled[i] = static_cast<double>(sums[i]) * factor[i / kPanel];
    cpu::multiply_pairs<kGemmRows, kPanelVectors, kStride, kPanel, Sums::kScaleAndAdd>(depth, a.data(), pairs.data(),
                                                                                       sums.data(), factor.data());
    check_products("rows", depth, a, rows, kPanel, 1, sums, scaled);
  }
}

void run() {
  static_assert(cpu::kHasPairs, "this driver is for a level with AVX512-BF16");
  const auto a = drawn<bfloat16_t>(kGemmRows * kStride);
  run_columns<72, bfloat16_t>(a);
  run_columns<72, fp8_e4m3_t>(a);
  run_columns<56, fp8_e5m2_t>(a);
  run_rows(a, bfloat16_t{0x7fc0});
  run_rows(a, fp8_e4m3_t{0x7f});
  run_rows(a, fp8_e5m2_t{0x7f});

  // Weights of a row after conversion.
  const auto weights = drawn<float>(kLanes * 20);
  for (int i = 0; i < 20; ++i) {
    bfloat16_t rounded[kLanes];
    cpu::store_rounded(rounded, cpu::load(&weights[i * kLanes]));
    for (int lane = 0; lane < kLanes; ++lane)
      check_rounded("store_rounded", lane, rounded[lane], weights[i * kLanes + lane], 0);
  }
}
