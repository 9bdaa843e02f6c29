// Grouped GEMM: parameters of the kernels. Each group of rows has a matrix of its own.
#pragma once

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/indices.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

// Scale factors of a matrix, float32, shared by blocks. A stride of 0 shares one factor over the whole
// extent.
struct GemmScale {
  const float* data;  // null: every factor is 1
  int64_t matrix_stride, depth_stride;
  Rows layout;   // layout of a matrix's factors
  int64_t rows;  // rows that share a factor, at least 1

  // Return the factors of a row, the first block of k first.
  FLASHINFER_HD const float* of_row(int64_t matrix, int64_t row) const {
    return data + matrix * matrix_stride + layout.offset(row / rows);
  }
};

// Output rows [begin, end) and the index of their matrix.
struct GemmGroup {
  int64_t begin, end, matrix;
};

// Order of the two halves of b's rows if one half is a gate: out = silu(gate) * linear, with n / 2 columns.
enum class GemmGate : int32_t { kNone, kLinearFirst, kGateFirst };

// out[r] = row_scale[r] * (a[a_rows[r]] * scale) @ (b[matrix] * scale)^T for each row r of each group.
struct GemmParams {
  const void *a, *b;  // [a_num_rows, k] and [num_matrices, n, k]
  void* out;          // [m, n]
  Rows a_layout, out_layout;
  const float* row_scale;
  const int32_t* a_rows;
  Indices m_indptr, m_counts, b_indices;
  int64_t b_matrix_stride, b_stride_n, b_stride_k;
  int64_t m, n, k, a_num_rows, num_groups, num_matrices;
  GemmScale a_scale, b_scale;
  int64_t scale_depth;  // elements of k that share a factor; 0: all
  DType a_dtype, b_dtype, out_dtype;
  GemmGate gate;
  int32_t arch;  // requires the kernels of this arch, such as 90, else fails; 0: any

  // Return the rows of a group, clipped to the output. An invalid matrix index empties the group. The binding
  // refuses both in tables on the host.
  FLASHINFER_HD GemmGroup group(int64_t g) const {
    const int64_t each = m / num_groups;
    int64_t begin = m_indptr.data ? m_indptr[g] : g * each, end = begin + each;
    if (begin < 0) begin = 0;
    if (begin > m) begin = m;
    if (m_counts.data) {
      const int64_t limit = m_indptr.data ? m - begin : each, count = m_counts[g];
      end = begin + (count < 0 ? 0 : count < limit ? count : limit);
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
// Compute the gate in the epilogue and return true. Return false if no kernel serves the call: the caller
// then runs grouped_gemm() and gate_rows().
bool grouped_gemm_with_gate(const GemmParams& params, const Launch& launch);
struct ActivateParams;
void gate_rows(const ActivateParams& params, const Launch& launch);

}  // namespace flashinfer
