// Operator of the gemm family.
#include "binding/binding.h"

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/common/gemm.h>

#include <algorithm>
#include <initializer_list>

namespace flashinfer::binding {
namespace {

using Maybe = std::optional<Tensor>;

std::string text_of(int64_t number) { return std::to_string(number); }

int64_t rows_in(const View& arg) { return arg.ndim == 2 ? arg.size(0) : arg.size(0) * arg.size(1); }

void check_element_types(const Check& check, const View& a, const View& b, const View& out) {
  check.dtype(a, {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2});
  if (size_of(a.dtype) == 1) {
    check.dtype(b, {DType::kFloat8E4M3, DType::kFloat8E5M2});
  } else {
    check.same_dtype(b, a);
  }
  check.floating(out);
}

// Return a tensor of indices, one for each of `count` groups; a negative count accepts any number.
Indices indices_of(const Check& check, const Maybe& tensor, const char* name, const View& like, int64_t count) {
  if (!tensor) return {};
  const View list(*tensor, name);
  check.rank(list, 1, 1);
  check.dtype(list, {DType::kInt32, DType::kInt64});
  check.same_device(list, like);
  check.contiguous(list);
  check.aligned(list);
  if (count >= 0 && list.size(0) != count)
    check.fail(list, "got " + text_of(list.size(0)) + " elements, wanted " + text_of(count) + ", one for each group");
  return {list.data, list.dtype == DType::kInt64};
}

// Return true if one element of the scale serves a whole dimension; otherwise each serves `each` elements.
bool is_shared(const Check& check, const View& scale, int64_t dim, int64_t size, int64_t each) {
  const int64_t blocks = each ? (size + each - 1) / each : 1, got = scale.size(dim);
  if (got != 1 && got != blocks)
    check.fail(scale, "got " + text_of(got) + " elements in dimension " + text_of(dim < 0 ? dim + scale.ndim : dim) +
                          ", wanted " + (blocks == 1 ? "1" : "1 or " + text_of(blocks)));
  return got == 1;
}

constexpr Rows kOnePlace{INT64_MAX, 1, 0, 0, 0};

GemmScale scale_of(const Check& check, const Maybe& tensor, const char* name, const View& like, int64_t each_row,
                   int64_t each_depth) {
  GemmScale scale{nullptr, 0, 0, kOnePlace, std::max<int64_t>(each_row, 1)};
  if (!tensor) return scale;
  const View view(*tensor, name);
  check.rank(view, like.ndim, like.ndim);
  check.dtype(view, {DType::kFloat32});
  check.same_device(view, like);
  check.aligned(view);
  if (!is_shared(check, view, -1, like.size(-1), each_depth)) scale.depth_stride = view.stride(-1);
  scale.data = static_cast<const float*>(view.data);
  return scale;
}

// Return the factors of a. The rows of a three-dimensional scale are its first two dimensions.
GemmScale a_scale_of(const Check& check, const Maybe& tensor, const View& a, int64_t each_row, int64_t each_depth) {
  GemmScale scale = scale_of(check, tensor, "a_scale", a, each_row, each_depth);
  if (!tensor) return scale;
  const View view(*tensor, "a_scale");
  if (a.ndim == 3 && each_row > 1) check.fail("granularity_m", "got more than 1 for an a of three dimensions");
  bool shared = is_shared(check, view, -2, a.size(-2), each_row);
  if (a.ndim == 3) shared = is_shared(check, view, 0, each_row ? a.size(0) : 1, 1) && shared;
  if (a.ndim == 3 && !shared) check.shape(view, {a.size(0), a.size(1), -1});
  if (!shared) scale.layout = check.rows(view);
  return scale;
}

GemmScale b_scale_of(const Check& check, const Maybe& tensor, const View& b, int64_t each_row, int64_t each_depth) {
  GemmScale scale = scale_of(check, tensor, "b_scale", b, each_row, each_depth);
  if (!tensor) return scale;
  const View view(*tensor, "b_scale");
  if (!is_shared(check, view, 0, b.size(0), 1)) scale.matrix_stride = view.stride(0);
  if (!is_shared(check, view, 1, b.size(1), each_row)) scale.layout = {INT64_MAX, 1, 0, 0, view.stride(1)};
  return scale;
}

int64_t number_of_groups(const Check& check, const Maybe& m_indptr, const Maybe& m_counts, const Maybe& b_indices,
                         int64_t matrices) {
  if (m_indptr) {
    const View list(*m_indptr, "m_indptr");
    if (list.numel < 1) check.fail(list, "got no element, wanted one more than there are groups");
    return list.numel - 1;
  }
  if (m_counts) return View(*m_counts, "m_counts").numel;
  return b_indices ? View(*b_indices, "b_indices").numel : matrices;
}

void check_groups(const Check& check, const GemmParams& p, const View& out, const Maybe& m_indptr,
                  const Maybe& b_indices) {
  if (!m_indptr && out.ndim == 3 && out.size(0) != p.num_groups)
    check.fail(out, "got a batch of " + text_of(out.size(0)) + ", wanted " + text_of(p.num_groups) + ", the groups");
  if (!b_indices && p.num_groups > p.num_matrices)
    check.fail("b", "got " + text_of(p.num_matrices) + " matrices for " + text_of(p.num_groups) + " groups");
  if (!m_indptr && p.num_groups > 0 && p.m % p.num_groups != 0)
    check.fail("out", "got " + text_of(p.m) + " rows, wanted a multiple of " + text_of(p.num_groups) + ", the groups");
}

// Check the rows that tables on the host name. The kernel reads and clips tables on a GPU.
void check_rows_of_groups(const Check& check, const GemmParams& p) {
  if (kOnCuda || !(p.m_indptr.data || p.m_counts.data)) return;
  for (int64_t g = 0; g < p.num_groups; ++g) {
    const auto within = [&](const char* table, const char* what, int64_t got, int64_t low, int64_t high) {
      if (got >= low && got <= high) return;
      check.fail(table, "got " + std::string(what) + text_of(got) + " of group " + text_of(g) + ", wanted " +
                            text_of(low) + " to " + text_of(high));
    };
    const int64_t begin = p.m_indptr.data ? p.m_indptr[g] : 0, high = p.m_indptr.data ? p.m : p.m / p.num_groups;
    within("m_indptr", "begin ", begin, 0, high);
    if (p.m_counts.data) {
      within("m_counts", "count ", p.m_counts[g], 0, high - begin);
    } else {
      within("m_indptr", "end ", p.m_indptr[g + 1], begin, high);
    }
  }
}

// b must be contiguous along k or along n.
void check_b_layout(const Check& check, const View& b) {
  if (b.numel == 0 || b.size(-1) <= 1 || b.stride(-1) == 1) return;
  if (size_of(b.dtype) > 1 && (b.size(-2) <= 1 || b.stride(-2) == 1)) return;
  check.fail(b, size_of(b.dtype) == 1 ? "got a stride of the last dimension, wanted 1"
                                      : "got strides of both last dimensions, wanted 1 of one of them");
}

// out = silu(gate) * linear, by a fused kernel or from products in memory.
void run_with_gate(const Check& check, const GemmParams& p, const Tensor& a, const View& out, const Maybe& m_indptr) {
  check.rank(out, 2, 2);
  check.contiguous(out);
  check.dtype(out, {p.a_dtype});
  check.that(p.a_dtype != DType::kFloat8E4M3 && p.a_dtype != DType::kFloat8E5M2, "a", "got fp8 with a gate");
  check.that(!p.a_scale.data && !p.b_scale.data && !p.row_scale, "gate", "got factors with a gate");
  check.that(m_indptr && !p.m_indptr.wide, "m_indptr", "got None or int64, wanted int32 with a gate");
  const OnDevice where{View(a, "a")};
  if (grouped_gemm_with_gate(p, where)) return;
  const int64_t shape[] = {p.m, p.n};
  Tensor products = empty(shape, 2, a);
  const View hidden(products, "products");
  GemmParams plain = p;
  plain.gate = GemmGate::kNone, plain.out = hidden.data, plain.out_layout = check.rows(hidden);
  grouped_gemm(plain, where);
  ActivateParams gate{};
  gate.input = hidden.data, gate.input_stride = p.n, gate.dtype = p.a_dtype, gate.output = p.out;
  gate.rows = p.m, gate.size = p.n / 2, gate.act = Activation::kSwiglu;
  gate.indptr = static_cast<const int32_t*>(p.m_indptr.data), gate.experts = static_cast<int>(p.num_groups);
  gate.gate_first = p.gate == GemmGate::kGateFirst;
  gate_rows(gate, where);
}

void run_grouped_gemm(const Tensor& out_, const Tensor& a_, const Tensor& b_, const Maybe& a_scale,
                      const Maybe& b_scale, const Maybe& m_indptr, const Maybe& m_counts, const Maybe& b_indices,
                      const Maybe& a_rows, const Maybe& row_scale, int64_t granularity_m, int64_t granularity_n,
                      int64_t granularity_k, int64_t arch, int64_t gate) {
  const Check check("grouped_gemm");
  const View out(out_, "out"), a(a_, "a"), b(b_, "b");
  check.rank(out, 2, 3), check.rank(a, 2, 3), check.rank(b, 3, 3);
  check_element_types(check, a, b, out);
  check.that(arch >= 0 && arch < 1000, "arch", "got another number, wanted 0 or an arch such as 90");
  check.that(gate >= 0 && gate <= 2, "gate", "got another number, wanted 0, 1 or 2");
  const int64_t n = out.size(-1) * (gate ? 2 : 1), k = a.size(-1), m = rows_in(out);
  check.shape(b, {-1, n, k});
  if (!a_rows && rows_in(a) != m)
    check.fail(a, "got " + text_of(rows_in(a)) + " rows, wanted " + text_of(m) + " as out has");
  check.same_device(b, a), check.same_device(out, a);
  check.last_contiguous(out), check.last_contiguous(a);
  check_b_layout(check, b);
  check.aligned(a), check.aligned(b), check.writable(out);
  check.no_overlap(out, a, false), check.no_overlap(out, b, false);
  for (const auto& [name, each] : {std::pair<const char*, int64_t>{"granularity_m", granularity_m},
                                   {"granularity_n", granularity_n},
                                   {"granularity_k", granularity_k}})
    check.that(each >= 0, name, "got a negative number, wanted 0 for one scale of the whole extent, or more");
  GemmParams p{};
  p.a = a.data, p.b = b.data, p.out = out.data;
  p.a_layout = check.rows(a), p.out_layout = check.rows(out);
  const bool by_depth = b.size(2) <= 1 ? b.stride(1) != 1 || b.size(1) <= 1 : b.stride(2) == 1;
  p.b_matrix_stride = b.stride(0), p.b_stride_n = by_depth ? b.stride(1) : 1, p.b_stride_k = by_depth ? 1 : b.stride(2);
  p.m = m, p.n = n, p.k = k, p.a_num_rows = rows_in(a), p.num_matrices = b.size(0);
  p.num_groups = number_of_groups(check, m_indptr, m_counts, b_indices, p.num_matrices);
  p.m_indptr = indices_of(check, m_indptr, "m_indptr", a, -1);
  p.m_counts = indices_of(check, m_counts, "m_counts", a, p.num_groups);
  p.b_indices = indices_of(check, b_indices, "b_indices", a, p.num_groups);
  check_groups(check, p, out, m_indptr, b_indices);
  check_rows_of_groups(check, p);
  p.a_scale = a_scale_of(check, a_scale, a, granularity_m, granularity_k);
  p.b_scale = b_scale_of(check, b_scale, b, granularity_n, granularity_k);
  // Factors that all of k shares are applied once.
  p.scale_depth = p.a_scale.depth_stride || p.b_scale.depth_stride ? granularity_k : 0;
  if (p.scale_depth && size_of(a.dtype) > 1)
    check.fail("granularity_k", "got scales along the depth of " + std::string(to_string(a.dtype)) + ", wanted fp8");
  for (const auto& [tensor, name, dtype] :
       {std::tuple<const Maybe&, const char*, DType>{a_rows, "a_rows", DType::kInt32},
        {row_scale, "row_scale", DType::kFloat32}}) {
    if (!tensor) continue;
    const View list(*tensor, name);
    check.dtype(list, {dtype});
    check.shape(list, {m});
    check.same_device(list, a);
    check.contiguous(list), check.aligned(list);
    (dtype == DType::kInt32 ? reinterpret_cast<const void*&>(p.a_rows) : reinterpret_cast<const void*&>(p.row_scale)) =
        list.data;
  }
  p.a_dtype = a.dtype, p.b_dtype = b.dtype, p.out_dtype = out.dtype;
  p.arch = static_cast<int32_t>(arch), p.gate = static_cast<GemmGate>(gate);
  if (m == 0 || n == 0 || p.num_groups == 0) return;
  if (gate) return run_with_gate(check, p, a_, out, m_indptr);
  grouped_gemm(p, OnDevice(a));
}

FLASHINFER_LIBRARY(m) { m.impl("grouped_gemm", box<run_grouped_gemm>); }

}  // namespace
}  // namespace flashinfer::binding
