// Grouped GEMM of 16-bit rows and MXFP4 matrices, against double. The driver packs codes and scales itself.
#include <flashinfer/cpu/mxfp4_gemm.h>

#include "gemm_groups.h"

using namespace driver;

// Return the word of eight codes of a row, as common/mxfp4_gemm.h describes it.
uint32_t word_of(const uint8_t* codes) {
  uint32_t word = 0;
  for (int half = 0; half < 2; ++half) {
    const uint8_t first = codes[half], second = codes[2 + half], third = codes[4 + half], fourth = codes[6 + half];
    const uint32_t bits = (first >> 3) << 15 | (first & 7) << 6 | (second >> 3) << 12 | (second & 7) << 3 |
                          (third >> 3) << 9 | (third & 7) | (fourth >> 2) << 13 | (fourth & 3) << 10;
    word |= bits << (16 * half);
  }
  return word;
}

template <typename T>
void products(const GroupedShape& shape) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const std::vector<int32_t> indptr = first_rows(shape);
  const int64_t groups = static_cast<int64_t>(shape.sizes.size()), m = indptr.back() + 2, n = shape.n, k = shape.k;
  std::vector<uint8_t> codes(groups * n * k), packed(groups * n * k / 2), scales(groups * n * k / kMxfp4Group);
  std::vector<double> b(groups * n * k);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(drawn_int(0, 15));
  for (int64_t i = 0; i < groups * n * k; i += 8) {
    const uint32_t word = word_of(&codes[i]);
    std::memcpy(&packed[i / 2], &word, 4);
  }
  for (int64_t row = 0; row < groups * n; ++row) {
    for (int64_t group = 0; group < k / kMxfp4Group; ++group) {
      const int64_t block = row / kMxfp4Rows * (k / kMxfp4Depth) + group / 4;
      const int scale = drawn_int(117, 121);
      scales[(block * kMxfp4Rows + row % kMxfp4Rows) * 4 + group % 4] = static_cast<uint8_t>(scale);
      for (int64_t i = row * k + group * kMxfp4Group, end = i + kMxfp4Group; i < end; ++i)
        b[i] = (codes[i] & 8 ? -1 : 1) * std::ldexp(magnitudes[codes[i] & 7], scale - 127);
    }
  }
  const auto a = drawn<T>(m * k);
  auto out = unwritten<T>(m * (n + 3));
  Mxfp4GemmParams p{};
  p.a = a.data(), p.b = packed.data(), p.out = out.data(), p.scales = scales.data();
  p.a_layout = rows(m, k), p.out_layout = rows(m, n + 3);
  p.m_indptr = {indptr.data(), false};
  p.m = m, p.n = n, p.k = k, p.a_num_rows = m, p.num_groups = p.num_matrices = groups;
  p.a_dtype = p.out_dtype = kType<T>;
  cpu::mxfp4_gemm(p);
  check_groups("mxfp4_gemm", shape, indptr, out, [&](int64_t g, int64_t row, int64_t column, int64_t d) {
    return value(a[row * k + d]) * b[(g * n + column) * k + d];
  });
}

void run() {
  for (const GroupedShape& shape : {GroupedShape{{3, 0, 18}, 64, 128}, GroupedShape{{1, 33}, 192, 384}}) {
    products<half_t>(shape);
    products<bfloat16_t>(shape);
  }
}
