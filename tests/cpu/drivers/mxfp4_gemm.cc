// Grouped GEMM of 16-bit rows and MXFP4 matrices, against double. The driver packs codes and scales itself.
#include <flashinfer/cpu/mxfp4_gemm.h>

#include "harness.h"

using namespace driver;

struct Shape {
  std::vector<int64_t> sizes;
  int64_t n, k;
};

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
void products(const Shape& shape) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<int32_t> indptr{0};
  for (const int64_t size : shape.sizes) indptr.push_back(indptr.back() + static_cast<int32_t>(size));
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
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t row = indptr[g]; row < indptr[g + 1]; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        double want = 0, size = 0;
        for (int64_t d = 0; d < k; ++d) {
          const double term = value(a[row * k + d]) * b[(g * n + column) * k + d];
          want += term, size += std::fabs(term);
        }
        check_rounded("mxfp4_gemm", row, out[row * (n + 3) + column], want, 1e-6, size);
      }
      check("behind a row", row, value(out[row * (n + 3) + n]), NAN, 0);
    }
  }
  check("behind the groups", 0, value(out[(m - 2) * (n + 3)]), NAN, 0);
}

void run() {
  for (const Shape& shape : {Shape{{3, 0, 18}, 64, 128}, Shape{{1, 33}, 192, 384}}) {
    products<half_t>(shape);
    products<bfloat16_t>(shape);
  }
}
