// Products of groups of rows with matrices of their own: parameters shared by the binding and by the kernels.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

// Factors that blocks of a matrix share, float32. Strides are 0 where one number serves the whole extent.
struct GemmScale {
  const float* data;  // null: 1
  int64_t matrix_stride, depth_stride;
  Rows places;   // of a matrix's factors
  int64_t rows;  // that share a number, at least 1

  // Of a row of a matrix, in front of the blocks of the depth.
  FLASHINFER_HD const float* of_row(int64_t matrix, int64_t row) const {
    return data + matrix * matrix_stride + places.offset(row / rows);
  }
};

// Rows [begin, end) of the output, and the matrix that they are multiplied with.
struct GemmGroup {
  int64_t begin, end, matrix;
};

// Whether b's rows are two halves, of which one is a gate: out = silu(gate) * linear then, with half as many columns.
enum class GemmGate : int32_t { kNone, kLinearFirst, kGateFirst };

// out[r] = row_scale[r] * (a[a_rows[r]] * scale) @ (b[matrix] * scale)^T for each row r of each group.
struct GemmParams {
  const void *a, *b;  // [a_num_rows, k] and [num_matrices, n, k]
  void* out;          // [m, n]
  Rows a_places, out_places;
  const float* row_scale;
  const int32_t* a_rows;
  Indices m_indptr, m_counts, b_indices;
  int64_t b_matrix_stride, b_stride_n, b_stride_k;
  int64_t m, n, k, a_num_rows, num_groups, num_matrices;
  GemmScale a_scale, b_scale;
  int64_t scale_depth;  // numbers of the depth that share a factor; 0: all do
  DType a_dtype, b_dtype, out_dtype;
  GemmGate gate;
  bool sm90;  // the kernels for Hopper alone, or an error

  // Where a group's rows are. What points out of the output is cut off, which the binding refuses of tables on the
  // host, and a matrix that there is not leaves nothing.
  FLASHINFER_HD GemmGroup group(int64_t g) const {
    const int64_t each = m / num_groups;
    int64_t begin = m_indptr.data ? m_indptr[g] : g * each, end = begin + each;
    if (begin < 0) begin = 0;
    if (begin > m) begin = m;
    if (m_counts.data) {
      const int64_t most = m_indptr.data ? m - begin : each, count = m_counts[g];
      end = begin + (count < 0 ? 0 : count < most ? count : most);
    } else if (m_indptr.data) {
      end = m_indptr[g + 1];
      if (end > m) end = m;
    }
    const int64_t matrix = b_indices.data ? b_indices[g] : g;
    if (end < begin || matrix < 0 || matrix >= num_matrices) end = begin;
    return {begin, end, matrix};
  }
};

struct Launch;
void grouped_gemm(const GemmParams& params, const Launch& launch);  // without a gate
// With one, without products in memory; false where no kernel does so, which leaves the second half to gate_rows().
bool grouped_gemm_with_gate(const GemmParams& params, const Launch& launch);
struct ActivateParams;
void gate_rows(const ActivateParams& params, const Launch& launch);

}  // namespace flashinfer
