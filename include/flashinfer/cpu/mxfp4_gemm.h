// Grouped GEMM of 16-bit rows and MXFP4 matrices on the CPU. A task expands its columns, then multiplies them
// as grouped GEMM does.
#pragma once

#include <flashinfer/common/mxfp4_gemm.h>
#include <flashinfer/cpu/gemm.h>

namespace flashinfer::cpu {

// Write the four numbers of a half word to to[0], to[2], to[4] and to[6].
template <typename T>
inline void expand_mxfp4_half(uint32_t half, const T (&values)[16], T* to) {
  to[0] = values[(half >> 12 & 8) | (half >> 6 & 7)];
  to[2] = values[(half >> 9 & 8) | (half >> 3 & 7)];
  to[4] = values[(half >> 6 & 8) | (half & 7)];
  to[6] = values[(half >> 11 & 8) | (half >> 11 & 4) | (half >> 10 & 3)];
}

// Expand a row of a matrix. Products of a code and a scale are exact, also in bfloat16, except above its range.
template <typename T>
void expand_mxfp4_row(const uint8_t* codes, const uint8_t* scales, int64_t k, T* to) {
  constexpr float kMagnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  for (int64_t group = 0; group < k / kMxfp4Group; ++group) {
    const uint32_t bits = mxfp4_scale_bits(scales[group / 4 * (4 * kMxfp4Rows) + group % 4]);
    float scale;
    std::memcpy(&scale, &bits, 4);
    T values[16];
    for (int code = 0; code < 8; ++code) {
      values[code] = from_float<T>(kMagnitudes[code] * scale);
      values[code + 8] = from_float<T>(-kMagnitudes[code] * scale);
    }
    for (int i = 0; i < 4; ++i, codes += 4, to += 8) {
      uint32_t word;
      std::memcpy(&word, codes, 4);
      expand_mxfp4_half(word & 0xffff, values, to);
      expand_mxfp4_half(word >> 16, values, to + 1);
    }
  }
}

// Unit is that of GemmScratch, and T the type of the expanded matrix.
template <typename Unit, typename T>
void mxfp4_gemm_of(const Mxfp4GemmParams& p, DType expanded_dtype) {
  const std::vector<GemmTask> tasks = gemm_tasks(p);
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&](const auto& next) {
    std::vector<T> expanded(std::min(kTaskColumns, p.n) * p.k);
    GemmParams part = p;
    part.b = expanded.data(), part.b_dtype = expanded_dtype;
    part.b_matrix_stride = 0, part.b_stride_n = p.k, part.b_stride_k = 1;
    GemmScratch<Unit> scratch(part);
    for (size_t number = next(); number < tasks.size(); number = next()) {
      const GemmTask& task = tasks[number];
      for (int64_t i = 0; i < task.columns; ++i)
        expand_mxfp4_row(p.codes_of(task.matrix, task.column + i), p.scales_of(task.matrix, task.column + i), p.k,
                         expanded.data() + i * p.k);
      part.out = static_cast<char*>(p.out) + task.column * size_of(p.out_dtype);
      scratch.run({task.row, task.rows, 0, task.columns, 0});
    }
  });
}

inline void mxfp4_gemm(const Mxfp4GemmParams& p) {
  if (p.a_dtype == DType::kFloat16) return mxfp4_gemm_of<float, float>(p, DType::kFloat32);
  if (kHasPairs) return mxfp4_gemm_of<Pair, bfloat16_t>(p, DType::kBFloat16);
  mxfp4_gemm_of<float, bfloat16_t>(p, DType::kBFloat16);
}

}  // namespace flashinfer::cpu
