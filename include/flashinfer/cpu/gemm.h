// Grouped GEMM on the CPU. A task has some rows of a group and some columns of its matrix, and packs them
// itself.
//
// A task accumulates in float, in memory. It processes k in parts that fit the cache and share scale factors.
// The parts do not depend on the number of rows, so a row has the same bits in any group.
#pragma once

#include <algorithm>
#include <vector>

#include <flashinfer/common/dispatch.h>
#include <flashinfer/common/gemm.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/panels.h>

namespace flashinfer::cpu {

constexpr int64_t kTaskRows = 24 * kTileRows, kTaskColumns = 4 * kTileColumns, kDepthUnits = 256;
constexpr int64_t kStreamedRows = 16;  // with so few rows, b is multiplied while it is read, without packing

// Rows and columns of one group; `row` is an index of the output.
struct GemmTask {
  int64_t row, rows, column, columns, matrix;
};

template <typename Body>
inline void with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body(float{});
    case DType::kFloat16: return body(half_t{});
    case DType::kBFloat16: return body(bfloat16_t{});
    case DType::kFloat8E4M3: return body(fp8_e4m3_t{});
    case DType::kFloat8E5M2: return body(fp8_e5m2_t{});
    default: throw_value_error(std::string("dtype: got ") + to_string(dtype) + ", wanted a floating one");
  }
}

// Scratch memory of a thread.
template <typename Unit>
class GemmScratch {
 public:
  explicit GemmScratch(const GemmParams& p)
      : p_(p),
        left_(kTaskRows * kDepthUnits),
        panel_(kDepthUnits * kTileColumns),
        sums_(kTaskRows * kTaskColumns),
        row_factor_(kTaskRows),
        column_factor_(kTaskColumns) {}

  void run(const GemmTask& task) {
    std::fill(row_factor_.begin(), row_factor_.end(), 1.0f);
    if (p_.k == 0) std::fill(sums_.begin(), sums_.end(), 0.0f);
    if (task.rows <= kStreamedRows && p_.b_stride_k == 1) {
      stream(task);
    } else {
      for_parts([&](int64_t k, int64_t depth) { multiply(task, k, depth); });
    }
    write(task);
  }

 private:
  // Call body(first, depth) for each part of k.
  template <typename Body>
  void for_parts(const Body& body) const {
    const int64_t scaled_depth = p_.scale_depth ? p_.scale_depth : std::max<int64_t>(p_.k, 1);
    const int64_t max_depth = kDepthUnits * kUnitDepth<Unit>;
    for (int64_t k = 0, depth; k < p_.k; k += depth) {
      depth = std::min({max_depth, p_.k - k, scaled_depth - k % scaled_depth});
      body(k, depth);
    }
  }

  // Return the units of a part, rounded up to whole vectors.
  static int64_t units_of(int64_t depth) {
    constexpr int64_t kStep = kLanes * kUnitDepth<Unit>;
    return (depth + kStep - 1) / kStep * kLanes;
  }

  void stream(const GemmTask& task) {
    int64_t units = 0;
    for_parts([&](int64_t, int64_t depth) { units += units_of(depth); });
    if (static_cast<int64_t>(left_.size()) < task.rows * units) left_.resize(task.rows * units);
    int64_t unit = 0;
    for_parts([&](int64_t k, int64_t depth) {
      pack_rows(task, k, depth, left_.data() + unit, units);
      unit += units_of(depth);
    });
    with_type(p_.b_dtype, [&](auto one) {
      using T = decltype(one);
      if constexpr (kUnitDepth<Unit> == 1 || kFitsPairs<T>) {
        for (int64_t column = 0; column < task.columns; column += kLanes) stream_from<T>(task, column, units);
      }
    });
  }

  // Multiply kLanes columns of a task with all its rows, over all of k.
  template <typename T>
  void stream_from(const GemmTask& task, int64_t column, int64_t units) {
    const T* from = static_cast<const T*>(p_.b) + task.matrix * p_.b_matrix_stride;
    from += (task.column + column) * p_.b_stride_n;
    const Unit* left = left_.data();
    for_parts([&](int64_t k, int64_t depth) {
      vfloat sums[kStreamedRows];
      stream_columns(task.rows, left, units, from + k, p_.b_stride_n, task.columns - column, depth, sums);
      left += units_of(depth);
      if (p_.scale_depth) find_factors(task, k / p_.scale_depth, column, kLanes);
      const TileSums become{k > 0, p_.scale_depth ? row_factor_.data() : nullptr, column_factor_.data() + column};
      for (int64_t row = 0; row < task.rows; ++row) {
        float* to = sums_.data() + row * kTaskColumns + column;
        store(to, finish_sums(load(to), sums[row], become, row, 0));
      }
    });
  }

  int64_t row_of_a(int64_t row) const {
    if (!p_.a_rows) return row;
    const int64_t from = p_.a_rows[row];
    return from >= 0 && from < p_.a_num_rows ? from : -1;
  }

  void multiply(const GemmTask& task, int64_t k, int64_t depth) {
    const int64_t units = (depth + kUnitDepth<Unit> - 1) / kUnitDepth<Unit>;
    pack_rows(task, k, depth, left_.data(), kDepthUnits);
    if (p_.scale_depth) find_factors(task, k / p_.scale_depth, 0, task.columns);
    for (int64_t column = 0; column < task.columns; column += kTileColumns) {
      pack_panel(task, task.column + column, std::min<int64_t>(kTileColumns, task.columns - column), k, depth);
      const TileSums become{k > 0, p_.scale_depth ? row_factor_.data() : nullptr, column_factor_.data() + column};
      multiply_rows(task.rows, units, left_.data(), kDepthUnits, panel_.data(), sums_.data() + column, kTaskColumns,
                    become);
    }
  }

  void pack_rows(const GemmTask& task, int64_t k, int64_t depth, Unit* to, int64_t stride) {
    with_type(p_.a_dtype, [&](auto one) {
      using T = decltype(one);
      if constexpr (kUnitDepth<Unit> == 1 || kFitsPairs<T>) {
        for (int64_t i = 0; i < task.rows; ++i, to += stride) {
          const int64_t row = row_of_a(task.row + i);
          if (row < 0) {
            std::fill(to, to + units_of(depth), Unit{});
          } else {
            pack_units<Unit>(static_cast<const T*>(p_.a) + p_.a_layout.offset(row) + k, depth, to);
          }
        }
      }
    });
  }

  void pack_panel(const GemmTask& task, int64_t column, int64_t columns, int64_t k, int64_t depth) {
    with_type(p_.b_dtype, [&](auto one) {
      using T = decltype(one);
      if constexpr (kUnitDepth<Unit> == 1 || kFitsPairs<T>) {
        const T* from = static_cast<const T*>(p_.b) + task.matrix * p_.b_matrix_stride;
        if (p_.b_stride_k == 1) {
          pack_columns_of(from + column * p_.b_stride_n + k, p_.b_stride_n, columns, depth, panel_.data());
        } else {
          pack_steps_of(from + k * p_.b_stride_k + column, p_.b_stride_k, columns, depth, panel_.data());
        }
      }
    });
  }

  // Find the factors of one block of k.
  void find_factors(const GemmTask& task, int64_t block, int64_t column, int64_t columns) {
    for (int64_t i = 0; i < task.rows && p_.a_scale.data; ++i) {
      const int64_t row = row_of_a(task.row + i);
      row_factor_[i] = row < 0 ? 0 : p_.a_scale.of_row(0, row)[block * p_.a_scale.depth_stride];
    }
    for (int64_t j = column; j < std::min(column + columns, task.columns); ++j) {
      const bool scaled = p_.b_scale.data != nullptr;
      column_factor_[j] =
          scaled ? p_.b_scale.of_row(task.matrix, task.column + j)[block * p_.b_scale.depth_stride] : 1.0f;
    }
  }

  void write(const GemmTask& task) {
    const bool scaled = !p_.scale_depth && (p_.a_scale.data || p_.b_scale.data);
    if (scaled) find_factors(task, 0, 0, task.columns);
    with_type(p_.out_dtype, [&](auto one) {
      using T = decltype(one);
      if constexpr (sizeof(T) > 1) {
        for (int64_t i = 0; i < task.rows; ++i) {
          const int64_t row = task.row + i;
          T* to = static_cast<T*>(p_.out) + p_.out_layout.offset(row) + task.column;
          const float* from = sums_.data() + i * kTaskColumns;
          const float last = p_.row_scale ? p_.row_scale[row] : 1.0f;
          for_lanes(task.columns, [&](int64_t j, int count) {
            vfloat sum = load(from + j);
            if (scaled) sum *= load(column_factor_.data() + j) * row_factor_[i];
            store(to + j, sum * last, count);
          });
        }
      }
    });
  }

  const GemmParams& p_;
  std::vector<Unit> left_, panel_;
  std::vector<float> sums_, row_factor_, column_factor_;
};

// Split all groups into tasks: several per thread, with a group's rows spread evenly.
inline std::vector<GemmTask> gemm_tasks(const GemmParams& p) {
  std::vector<GemmGroup> groups;
  int64_t blocks = 0;
  for (int64_t g = 0; g < p.num_groups; ++g) {
    const GemmGroup group = p.group(g);
    if (group.end > group.begin) groups.push_back(group), blocks += (group.end - group.begin - 1) / kTaskRows + 1;
  }
  int64_t columns = kTaskColumns;
  while (columns > kTileColumns && blocks * ((p.n + columns - 1) / columns) < 4 * num_threads()) columns /= 2;
  std::vector<GemmTask> tasks;
  for (const GemmGroup& group : groups) {
    const int64_t rows = group.end - group.begin, parts = (rows - 1) / kTaskRows + 1;
    const int64_t step = ((rows + parts - 1) / parts + kTileRows - 1) / kTileRows * kTileRows;
    for (int64_t column = 0; column < p.n; column += columns)
      for (int64_t row = 0; row < rows; row += step)
        tasks.push_back(
            {group.begin + row, std::min(step, rows - row), column, std::min(columns, p.n - column), group.matrix});
  }
  return tasks;
}

template <typename Unit>
void grouped_gemm_of(const GemmParams& p) {
  const std::vector<GemmTask> tasks = gemm_tasks(p);
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&](const auto& next) {
    GemmScratch<Unit> scratch(p);
    for (size_t task = next(); task < tasks.size(); task = next()) scratch.run(tasks[task]);
  });
}

inline void grouped_gemm(const GemmParams& p) {
  const auto fits = [](DType dtype) { return dtype == DType::kBFloat16 || size_of(dtype) == 1; };
  const bool pairs = kHasPairs && fits(p.a_dtype) && fits(p.b_dtype);
  pairs ? grouped_gemm_of<Pair>(p) : grouped_gemm_of<float>(p);
}

}  // namespace flashinfer::cpu
