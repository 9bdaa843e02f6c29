// What the delta rule's chunk forms on the CPU share: sixteen tokens of a value head, and products of small matrices.
//
// States lie transposed, 32 rows of V by K, and everything of a chunk [V, tokens], so that each product has tokens or
// keys in its vectors. With i, j numbers of tokens, G the sums of g from the chunk's start and Gam_ij = exp(G_i - G_j):
//   L = strict lower(k_i k_j Gam_ij)    P = scale lower(q_i k_j Gam_ij)    Z = (I + L B)^-1 L,   B = diag(beta)
#pragma once

#include <flashinfer/cpu/delta_rule/columns.h>
#include <flashinfer/cpu/simd/gemm.h>

namespace flashinfer::cpu {

constexpr int kChunk = 16;

struct alignas(64) Line {
  float at[16];
};

// Floats from the start of a line of the cache on.
class Lines {
 public:
  explicit Lines(int64_t count = 0) { resize(count); }
  // All of them are zeros then.
  void resize(int64_t count) { lines_.assign((count + 15) / 16, Line{}); }
  float* data() { return lines_.empty() ? nullptr : lines_[0].at; }
  const float* data() const { return lines_.empty() ? nullptr : lines_[0].at; }

 private:
  std::vector<Line> lines_;
};

// A left factor: element (row, k) is at[row * row_step + k * depth_step].
struct Left {
  const float* at;
  int64_t row_step, depth_step;
};
// A right factor of rows that lie `step` apart.
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

// Calls finish(row, column, sums) for each vector of left [rows, depth] times right [depth, columns], both sizes being
// multiples of 16.
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

// to[j][i] = from[i][j] of a matrix whose sizes are multiples of 16.
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

// Columns [first, first + count) of each of some tokens' rows as [kDeltaColumns, kChunk]; zeros elsewhere. `row(i)`
// points to the first of them.
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

// 32 columns of a state, transposed: from or to a tensor of states, which are floats. Null: zeros.
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
                        const float* from) {
  const int64_t count = std::min<int64_t>(kDeltaColumns, in.value_dim - first);
  float* to = static_cast<float*>(states) + head * in.state_size() + first * in.column_stride();
  if (in.v_first) {
    for (int64_t c = 0; c < count; ++c) std::memcpy(to + c * in.key_dim, from + c * pad, in.key_dim * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < in.key_dim; d += kChunk) {
    alignas(64) float rows[kChunk][kDeltaColumns];
    const int64_t here = std::min<int64_t>(kChunk, in.key_dim - d);
    transpose(kDeltaColumns, kChunk, from + d, pad, rows[0], kDeltaColumns);
    for (int64_t i = 0; i < here; ++i) std::memcpy(to + (d + i) * in.value_dim, rows[i], count * sizeof(float));
  }
}

// Whether a call is one for these forms: numbers of the state are floats, rows decay alike, and there are some tokens.
template <typename T>
bool takes_chunks(const DeltaRuleInputs& in) {
  return !std::is_same_v<T, double> && !in.gk && !in.beta_is_vector &&
         in.batch_size * in.num_tokens >= 8 * in.num_sequences;
}

// e^x of x that is not positive.
inline vfloat decay_of(vfloat x) { return exp(max(x, splat(-87.f))); }

// Numbers of up to sixteen tokens of a value head. Tokens that are not there are zeros which decay nothing.
struct ChunkFactors {
  static constexpr int kSquare = kChunk * kChunk;

  alignas(64) float beta[kChunk], decay[kChunk], rest[kChunk];  // exp(G_i), and exp(G of the last - G_i)
  alignas(64) float gam[kSquare], l[kSquare], p[kSquare], z[kSquare], zt[kSquare], pt[kSquare];  // ..t: transposed
  float last;                                                                                    // exp(G of the last)

  template <typename T>
  void load(const TokenRows<T>& rows, int64_t batch, int64_t first, int count) {
    float sums[kChunk], sum = 0;
    for (int i = 0; i < kChunk; ++i) {
      // Sums of hugely negative numbers would lose the digits of those that follow; exp(-50) is nothing.
      if (i < count) sum += std::max(rows.gate(batch, first + i), -50.f);
      beta[i] = i < count ? rows.scalar_beta(batch, first + i) : 0.f;
      sums[i] = sum;
    }
    last = std::exp(sum);
    for (int i = 0; i < kChunk; i += kLanes) {
      store(decay + i, decay_of(cpu::load(sums + i)));
      store(rest + i, decay_of(splat(sum) - cpu::load(sums + i)));
    }
    for (int i = 0; i < kChunk; ++i) {
      for (int j = 0; j < kChunk; j += kLanes)
        store(gam + i * kChunk + j, decay_of(splat(sums[i]) - cpu::load(sums + j)));
      std::fill(gam + i * kChunk + i + 1, gam + (i + 1) * kChunk, 0.f);
    }
  }

  // L, P and Z of rows k and q, and of k transposed.
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

// Rows of these tokens, k and q, and k transposed or both.
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
  float* q() { return rows_.data() + kChunk * pad; }            // [kChunk, pad], behind k
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

// Rows of the chunk that comes next, each far from the others in memory: lines of them are asked for a few at a time
// while this chunk is computed, since all at once they would wait for each other as the loads themselves do.
class Ahead {
 public:
  void clear() { rows_.clear(), row_ = 0, line_ = 0; }
  template <typename T>
  void add(const T* row, int64_t count) {
    rows_.push_back({reinterpret_cast<const char*>(row), count * static_cast<int64_t>(sizeof(T))});
  }
  void ask(int lines) {
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

// state = last state + left [kDeltaColumns, depth] right [depth, pad].
inline void advance(float* state, int64_t pad, float last, int64_t depth, const float* left, const float* right) {
  multiply(kDeltaColumns, pad, depth, {left, depth, 1}, {right, pad}, [&](int64_t row, int64_t d, vfloat sums) {
    float* to = state + row * pad + d;
    store(to, load(to) * last + sums);
  });
}

}  // namespace flashinfer::cpu
