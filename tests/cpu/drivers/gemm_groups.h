// Groups of rows of a grouped GEMM, and the check of its output against double.
#pragma once

#include "harness.h"

namespace driver {

struct GroupedShape {
  std::vector<int64_t> sizes;  // rows of each group
  int64_t n, k;
};

// Return the first row of each group, and the end of the last.
inline std::vector<int32_t> first_rows(const GroupedShape& shape) {
  std::vector<int32_t> result{0};
  for (const int64_t size : shape.sizes) result.push_back(result.back() + static_cast<int32_t>(size));
  return result;
}

// Rows of the output are n + 3 apart. It has two more rows than the groups. term(g, row, column, d) is a product of the
// sum over d.
template <typename O, typename Term>
void check_groups(const char* what, const GroupedShape& shape, const std::vector<int32_t>& indptr,
                  const std::vector<O>& out, const Term& term) {
  const int64_t stride = shape.n + 3;
  for (int64_t g = 0; g < static_cast<int64_t>(shape.sizes.size()); ++g) {
    for (int64_t row = indptr[g]; row < indptr[g + 1]; ++row) {
      for (int64_t column = 0; column < shape.n; ++column) {
        double want = 0, size = 0;
        for (int64_t d = 0; d < shape.k; ++d) {
          const double one = term(g, row, column, d);
          want += one, size += std::fabs(one);
        }
        check_rounded(what, row, out[row * stride + column], want, 1e-6, size);
      }
      check("behind a row", row, value(out[row * stride + shape.n]), NAN, 0);
    }
  }
  check("behind the groups", 0, value(out[indptr.back() * stride]), NAN, 0);
}

}  // namespace driver
