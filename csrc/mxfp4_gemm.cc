// Operator of grouped GEMM with MXFP4 matrices.
#include "binding/binding.h"

#include <flashinfer/common/mxfp4_gemm.h>

#include <optional>

namespace flashinfer::binding {
namespace {

// The kernels' tables of rows and groups are int32.
const void* table_of(const Check& check, const Tensor& tensor, const char* name, const View& like, int64_t count) {
  const View table(tensor, name);
  check.dtype(table, {DType::kInt32});
  check.shape(table, {count});
  check.same_device(table, like);
  check.contiguous(table);
  return table.data;
}

void run_mxfp4_gemm(const Tensor& out_, const Tensor& a_, const Tensor& b_, const Tensor& b_scale,
                    const Tensor& m_indptr, const std::optional<Tensor>& a_rows) {
  const Check check("mxfp4_gemm");
  const View out(out_, "out"), a(a_, "a"), b(b_, "b"), scales(b_scale, "b_scale");
  check.rank(a, 2, 2), check.rank(b, 3, 3), check.rank(out, 2, 2);
  check.dtype(a, {DType::kFloat16, DType::kBFloat16});
  check.same_dtype(out, a);
  check.dtype(b, {DType::kUInt8}), check.dtype(scales, {DType::kUInt8});
  const int64_t k = a.size(1), n = b.size(1), m = out.size(0), matrices = b.size(0);
  const auto multiple = [&](const View& arg, const char* what, int64_t got, int64_t of) {
    if (got % of != 0)
      check.fail(arg, "got " + std::to_string(got) + what + ", wanted a multiple of " + std::to_string(of));
  };
  multiple(a, " elements in a row", k, kMxfp4Depth), multiple(b, " rows of a matrix", n, kMxfp4Rows);
  check.int32("out", m), check.int32("a", a.size(0)), check.int32("b", n);
  check.shape(b, {-1, -1, k / 2}), check.shape(out, {-1, n});
  check.shape(scales, {matrices, n / kMxfp4Rows, k / kMxfp4Depth, 16, 16});
  if (!a_rows && a.size(0) != m)
    check.fail(a, "got " + std::to_string(a.size(0)) + " rows, wanted " + std::to_string(m) + " as out has");
  for (const View* arg : {&out, &b, &scales}) check.same_device(*arg, a);
  check.contiguous(b), check.contiguous(scales);
  for (const View* arg : {&a, &out, &b, &scales}) check.last_contiguous(*arg), check.wide_rows(*arg);
  check.writable(out);
  for (const View* arg : {&a, &b, &scales}) check.no_overlap(out, *arg, false);
  Mxfp4GemmParams p{};
  p.a = a.data, p.b = b.data, p.out = out.data, p.scales = static_cast<const uint8_t*>(scales.data);
  p.a_layout = check.rows(a), p.out_layout = check.rows(out);
  p.m = m, p.n = n, p.k = k, p.a_num_rows = a.size(0), p.num_matrices = matrices, p.num_groups = matrices;
  p.m_indptr = {table_of(check, m_indptr, "m_indptr", a, matrices + 1), false};
  if (a_rows) p.a_rows = static_cast<const int32_t*>(table_of(check, *a_rows, "a_rows", a, m));
  p.a_dtype = a.dtype, p.b_dtype = DType::kUInt8, p.out_dtype = a.dtype;
  if (m == 0 || n == 0 || matrices == 0) return;
  mxfp4_gemm(p, OnDevice(a));
}

FLASHINFER_LIBRARY(m) { m.impl("mxfp4_gemm", box<run_mxfp4_gemm>); }

}  // namespace
}  // namespace flashinfer::binding
