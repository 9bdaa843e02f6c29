// Grouped GEMM: groups of few and many rows with matrices of their own, against double.
#include <flashinfer/cpu/gemm.h>

#include "gemm_groups.h"

using namespace driver;

// Scales: one for 32 elements of k of a row of a, and for 16 rows of a matrix.
template <typename A, typename B, typename O>
void products(const GroupedShape& shape, bool by_depth, bool with_scales) {
  constexpr int64_t kRowsShare = 16, kDepthShare = 32;
  const std::vector<int32_t> indptr = first_rows(shape);
  const int64_t groups = static_cast<int64_t>(shape.sizes.size()), m = indptr.back() + 2, n = shape.n, k = shape.k;
  const int64_t depths = (k + kDepthShare - 1) / kDepthShare, blocks = (n + kRowsShare - 1) / kRowsShare;
  const auto a = drawn<A>(m * k);
  const auto b = drawn<B>(groups * n * k);
  auto out = unwritten<O>(m * (n + 3));
  const auto a_scale = drawn<float>(m * depths), b_scale = drawn<float>(groups * blocks * depths);
  GemmParams p{};
  p.a = a.data(), p.b = b.data(), p.out = out.data();
  p.a_layout = rows(m, k), p.out_layout = rows(m, n + 3);
  p.m_indptr = {indptr.data(), false};
  p.b_matrix_stride = n * k, p.b_stride_n = by_depth ? k : 1, p.b_stride_k = by_depth ? 1 : n;
  p.m = m, p.n = n, p.k = k, p.a_num_rows = m, p.num_groups = p.num_matrices = groups;
  if (with_scales) {
    p.a_scale = {a_scale.data(), 0, 1, rows(m, depths), 1};
    p.b_scale = {b_scale.data(), blocks * depths, 1, rows(blocks, depths), kRowsShare};
    p.scale_depth = kDepthShare;
  }
  p.a_dtype = kType<A>, p.b_dtype = kType<B>, p.out_dtype = kType<O>;
  cpu::grouped_gemm(p);
  check_groups("grouped_gemm", shape, indptr, out, [&](int64_t g, int64_t row, int64_t column, int64_t d) {
    const int64_t at = g * n * k + (by_depth ? column * k + d : d * n + column), part = d / kDepthShare;
    const double term = value(a[row * k + d]) * value(b[at]);
    if (!with_scales) return term;
    return term * (static_cast<double>(a_scale[row * depths + part]) *
                   b_scale[(g * blocks + column / kRowsShare) * depths + part]);
  });
}

void run() {
  const GroupedShape shapes[] = {{{3, 0, 18}, 70, 33}, {{1, 160}, 21, 96}, {{16, 17}, 130, 600}};
  for (const GroupedShape& shape : shapes) {
    for (const bool by_depth : {true, false}) {
      products<float, float, float>(shape, by_depth, false);
      products<half_t, half_t, bfloat16_t>(shape, by_depth, false);
      products<bfloat16_t, bfloat16_t, half_t>(shape, by_depth, by_depth);
    }
    products<fp8_e4m3_t, fp8_e5m2_t, float>(shape, true, true);
    products<fp8_e5m2_t, fp8_e4m3_t, bfloat16_t>(shape, true, false);
  }
}
