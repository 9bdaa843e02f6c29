// Shared parts of the chunk form on the CPU: sixteen tokens of a value head, and products of small matrices.
// The form is that of cuda/delta_rule/chunk/chunk.cuh (arXiv 2406.06484 and 2412.06464).
//
// States are transposed, 32 rows of V by K. Matrices of a chunk are [V, tokens]. Vectors of each product then
// run over tokens or keys. i and j are tokens of a chunk, G the cumulative sum of g from its first token, and
// Gam_ij = exp(G_i - G_j), B = diag(beta):
//   L = strict lower(k_i k_j Gam_ij)    P = scale lower(q_i k_j Gam_ij)    Z = (I + L B)^-1 L
#pragma once

#include <flashinfer/cpu/delta_rule/columns.h>
#include <flashinfer/cpu/simd/gemm.h>

namespace flashinfer::cpu {

constexpr int kChunk = 16;

struct alignas(64) Line {
  float at[16];
};

// Floats aligned to cache lines.
class Lines {
 public:
  explicit Lines(int64_t count = 0) { resize(count); }
  // Resize and clear.
  void resize(int64_t count) { lines_.assign((count + 15) / 16, Line{}); }
  float* data() { return lines_.empty() ? nullptr : lines_[0].at; }
  const float* data() const { return lines_.empty() ? nullptr : lines_[0].at; }

 private:
  std::vector<Line> lines_;
};

// Left factor: element (row, k) is at[row * row_step + k * depth_step].
struct Left {
  const float* at;
  int64_t row_step, depth_step;
};
// Right factor, with rows `step` apart.
struct Right {
  const float* at;
  int64_t step;
};

template <int kRows, int kVectors, typename Finish>
inline void product_tile(int64_t depth, const Left& left, int64_t row, const Right& right, int64_t column,
                         const Finish& finish) {
  vfloat sums[kRows][kVectors] = {};
  const float* a = left.at + row * left.row_step;
  const float* b = right.at + column;
  const int64_t step = left.row_step;
  for (int64_t k = 0; k < depth; ++k, a += left.depth_step, b += right.step) {
    vfloat vectors[kVectors];
    for (int v = 0; v < kVectors; ++v) vectors[v] = load(b + v * kLanes);
    for (int i = 0; i < kRows; ++i)
      for (int v = 0; v < kVectors; ++v) sums[i][v] += vectors[v] * a[i * step];
  }
  for (int i = 0; i < kRows; ++i)
    for (int v = 0; v < kVectors; ++v) finish(row + i, column + v * kLanes, sums[i][v]);
}

// Call finish(row, column, sums) for each vector of left [rows, depth] times right [depth, columns]. Rows
// and columns are multiples of 16.
template <typename Finish>
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const Left& left, const Right& right,
                     const Finish& finish) {
  int64_t column = 0;
  for (; column + kPanel <= columns; column += kPanel)
    for (int64_t row = 0; row < rows; row += kGemmRows)
      product_tile<kGemmRows, kPanelVectors>(depth, left, row, right, column, finish);
  for (; column < columns; column += kLanes)
    for (int64_t row = 0; row < rows; row += 2 * kGemmRows)
      product_tile<2 * kGemmRows, 1>(depth, left, row, right, column, finish);
}

// Transpose a matrix with sizes that are multiples of 16.
inline void transpose(int64_t rows, int64_t columns, const float* from, int64_t from_step, float* to, int64_t to_step) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      vfloat block[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) block[lane] = load(from + (i + lane) * from_step + j);
      transpose(block);
      for (int lane = 0; lane < kLanes; ++lane) store(to + (j + lane) * to_step + i, block[lane]);
    }
  }
}

// Load columns [first, first + count) of the rows of some tokens as [kDeltaColumns, kChunk], padded with
// zeros. `row(i)` points to the first column of token i.
template <typename Row>
void load_transposed(int tokens, int64_t count, float* to, const Row& row) {
  alignas(64) float rows[kChunk][kDeltaColumns] = {};
  for (int i = 0; i < tokens; ++i) load_row(row(i), count, rows[i]);
  transpose(kChunk, kDeltaColumns, rows[0], kDeltaColumns, to, kChunk);
}
template <typename Row>
void store_transposed(int tokens, int64_t count, const float* from, const Row& row) {
  alignas(64) float rows[kChunk][kDeltaColumns];
  transpose(kDeltaColumns, kChunk, from, kChunk, rows[0], kDeltaColumns);
  for (int i = 0; i < tokens; ++i) store_row(row(i), rows[i], count);
}

// Load and store 32 columns of a state, transposed. A null state is loaded as zeros.
inline void load_panel(const DeltaRuleInputs& in, const void* states, int64_t head, int64_t first, int64_t pad,
                       float* to) {
  std::fill_n(to, kDeltaColumns * pad, 0.f);
  if (!states) return;
  const int64_t count = std::min<int64_t>(kDeltaColumns, in.value_dim - first);
  const float* from = static_cast<const float*>(states) + head * in.state_size() + first * in.column_stride();
  if (in.v_first) {
    for (int64_t c = 0; c < count; ++c) std::memcpy(to + c * pad, from + c * in.key_dim, in.key_dim * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < in.key_dim; d += kChunk) {
    alignas(64) float rows[kChunk][kDeltaColumns] = {};
    const int64_t here = std::min<int64_t>(kChunk, in.key_dim - d);
    for (int64_t i = 0; i < here; ++i) std::memcpy(rows[i], from + (d + i) * in.value_dim, count * sizeof(float));
    transpose(kChunk, kDeltaColumns, rows[0], kDeltaColumns, to + d, pad);
  }
}

inline void store_panel(const DeltaRuleInputs& in, void* states, int64_t head, int64_t first, int64_t pad,
                        const float* from, DType dtype = DType::kFloat32) {
  const int64_t count = std::min<int64_t>(kDeltaColumns, in.value_dim - first);
  with_state_type<float>(dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(states) + head * in.state_size() + first * in.column_stride();
    if (in.v_first) {
      for (int64_t c = 0; c < count; ++c) store_row(to + c * in.key_dim, from + c * pad, in.key_dim);
      return;
    }
    for (int64_t d = 0; d < in.key_dim; d += kChunk) {
      alignas(64) float rows[kChunk][kDeltaColumns];
      const int64_t here = std::min<int64_t>(kChunk, in.key_dim - d);
      transpose(kDeltaColumns, kChunk, from + d, pad, rows[0], kDeltaColumns);
      for (int64_t i = 0; i < here; ++i) store_row(to + (d + i) * in.value_dim, rows[i], count);
    }
  });
}

// Return true if the chunk form supports the call: states are float, all rows share a decay, and sequences
// have some tokens.
template <typename T>
bool supports_chunks(const DeltaRuleInputs& in) {
  return !std::is_same_v<T, double> && !in.gk && !in.beta_is_vector &&
         in.batch_size * in.num_tokens >= 8 * in.num_sequences;
}

// Return e^x for x <= 0.
inline vfloat decay_of(vfloat x) { return exp(max(x, splat(-87.f))); }

// Factors of up to sixteen tokens of a value head. Missing tokens are zeros with decay 1.
struct ChunkFactors {
  static constexpr int kSquare = kChunk * kChunk;

  alignas(64) float beta[kChunk], decay[kChunk], rest[kChunk];  // exp(G_i), and exp(G_n - G_i) with the last token n
  alignas(64) float gam[kSquare], l[kSquare], p[kSquare], z[kSquare], zt[kSquare], pt[kSquare];  // zt, pt: transposed
  float last;                                                                                    // exp(G_n)

  template <typename T>
  void load(const TokenRows<T>& rows, int64_t batch, int64_t first, int count) {
    // In float, differences of sums would lose digits after every strongly negative gate: 4e-6 after a sum of
    // -64.
    double sums[kChunk], sum = 0;
    for (int i = 0; i < kChunk; ++i) {
      // A hugely negative g would take the digits of all later ones from a double too. exp(-50) is
      // negligible.
      if (i < count) sum += std::max(rows.gate(batch, first + i), -50.f);
      beta[i] = i < count ? rows.scalar_beta(batch, first + i) : 0.f;
      sums[i] = sum;
    }
    last = static_cast<float>(std::exp(sum));
    decays(decay, [&](int i) { return sums[i]; });
    decays(rest, [&](int i) { return sum - sums[i]; });
    for (int i = 0; i < kChunk; ++i) {
      decays(gam + i * kChunk, [&](int j) { return sums[i] - sums[j]; });
      std::fill(gam + i * kChunk + i + 1, gam + (i + 1) * kChunk, 0.f);
    }
  }

  // to[i] = exp(exponent(i))
  template <typename Exponent>
  static void decays(float* to, const Exponent& exponent) {
    for (int i = 0; i < kChunk; ++i) to[i] = static_cast<float>(exponent(i));
    for (int i = 0; i < kChunk; i += kLanes) store(to + i, decay_of(cpu::load(to + i)));
  }

  // Compute L, P and Z from rows k and q, and from k transposed.
  void correlate(int64_t pad, const float* k, const float* q, const Right& keys, float scale) {
    multiply(kChunk, kChunk, pad, {k, pad, 1}, keys, [&](int64_t i, int64_t j, vfloat sums) {
      store(l + i * kChunk + j, sums * cpu::load(gam + i * kChunk + j));
    });
    multiply(kChunk, kChunk, pad, {q, pad, 1}, keys, [&](int64_t i, int64_t j, vfloat sums) {
      store(p + i * kChunk + j, sums * cpu::load(gam + i * kChunk + j) * scale);
    });
    for (int i = 0; i < kChunk; ++i) {
      l[i * kChunk + i] = 0;
      vfloat row[kChunk / kLanes];
      for (int v = 0; v < kChunk / kLanes; ++v) row[v] = cpu::load(l + i * kChunk + v * kLanes);
      for (int j = 0; j < i; ++j) {
        const float factor = l[i * kChunk + j] * beta[j];
        for (int v = 0; v < kChunk / kLanes; ++v) row[v] -= cpu::load(z + j * kChunk + v * kLanes) * factor;
      }
      for (int v = 0; v < kChunk / kLanes; ++v) store(z + i * kChunk + v * kLanes, row[v]);
    }
    transpose(kChunk, kChunk, z, kChunk, zt, kChunk);
    transpose(kChunk, kChunk, p, kChunk, pt, kChunk);
  }
};

// Rows k and q of a chunk, and k transposed, optionally q too.
template <typename T>
class ChunkRows {
 public:
  explicit ChunkRows(int64_t key_dim, int transposed = 2)
      : pad(round_up(static_cast<int>(key_dim), kChunk)),
        transposed_(transposed),
        rows_((2 + transposed) * kChunk * pad) {}

  int64_t pad;
  int count;
  int64_t batch, first;  // of the tokens

  float* k() { return rows_.data(); }                           // [kChunk, pad]
  float* q() { return rows_.data() + kChunk * pad; }            // [kChunk, pad], after k
  float* columns() { return rows_.data() + 2 * kChunk * pad; }  // [pad, 2 kChunk], keys first
  Right keys() { return {columns(), transposed_ * kChunk}; }

  void load(const TokenRows<T>& rows, const Sequence& tokens, int64_t number) {
    batch = tokens.batch, first = tokens.begin + number * kChunk;
    count = static_cast<int>(std::min<int64_t>(kChunk, tokens.end - first));
    for (int i = 0; i < count; ++i) {
      rows.key(batch, first + i, k() + i * pad);
      rows.query(batch, first + i, q() + i * pad);
    }
    std::fill(k() + count * pad, q(), 0.f);
    std::fill(q() + count * pad, columns(), 0.f);
  }
  void transpose_keys() { transpose(kChunk, pad, k(), pad, columns(), transposed_ * kChunk); }
  void transpose_queries() { transpose(kChunk, pad, q(), pad, columns() + kChunk, 2 * kChunk); }

 private:
  int64_t transposed_;
  Lines rows_;
};

// Prefetch rows of the next chunk, which are scattered in memory. It issues a few cache lines at a time
// during the computation, because issued at once they would wait for each other as loads do.
class Prefetcher {
 public:
  void clear() { rows_.clear(), row_ = 0, line_ = 0; }
  template <typename T>
  void add(const T* row, int64_t count) {
    rows_.push_back({reinterpret_cast<const char*>(row), count * static_cast<int64_t>(sizeof(T))});
  }
  void prefetch(int lines) {
    for (; lines > 0 && row_ < rows_.size(); --lines) {
      __builtin_prefetch(rows_[row_].at + line_, 0, 2);
      line_ += 64;
      if (line_ >= rows_[row_].bytes) ++row_, line_ = 0;
    }
  }

 private:
  struct Row {
    const char* at;
    int64_t bytes;
  };
  std::vector<Row> rows_;
  size_t row_ = 0;
  int64_t line_ = 0;
};

// state = last state + left right, with left [kDeltaColumns, depth] and right [depth, pad].
inline void advance(float* state, int64_t pad, float last, int64_t depth, const float* left, const float* right) {
  multiply(kDeltaColumns, pad, depth, {left, depth, 1}, {right, pad}, [&](int64_t row, int64_t d, vfloat sums) {
    float* to = state + row * pad + d;
    store(to, load(to) * last + sums);
  });
}

}  // namespace flashinfer::cpu
