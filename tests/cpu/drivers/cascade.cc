// Merges of two attention states, and of any number.
#include <flashinfer/cpu/cascade.h>

#include "harness.h"

using namespace driver;

constexpr int64_t kTokens = 5, kHeads = 3, kRows = kTokens * kHeads;

std::vector<float> drawn_lse(int64_t count) {
  auto result = drawn<float>(count, 6);
  for (float& one : result)
    if (drawn_int(0, 4) == 0) one = -INFINITY;  // no keys
  return result;
}

template <typename T>
States states(std::vector<T>& v, std::vector<float>& s, int64_t dim, int64_t many = 1) {
  return {v.data(), s.data(), kHeads * many * dim, many * dim, kHeads * many, many};
}

// States [kRows, many] from which row `row` was merged.
template <typename T>
void check_merged(int64_t row, int64_t many, int64_t dim, const T* v, const float* s, const T* out, float lse) {
  double top = -INFINITY, total = 0;
  for (int64_t i = 0; i < many; ++i) top = std::max<double>(top, s[i]);
  for (int64_t i = 0; i < many && top > -INFINITY; ++i) total += std::exp2(s[i] - top);
  check("lse", row, lse, total == 0 ? -INFINITY : top + std::log2(total), 1e-6 * (1 + std::fabs(top)));
  for (int64_t d = 0; d < dim; ++d) {
    double want = 0;
    for (int64_t i = 0; i < many && total > 0; ++i) want += value(v[i * dim + d]) * std::exp2(s[i] - top) / total;
    check_rounded("v", row * dim + d, out[d], want, 1e-6);
  }
}

template <typename T>
void merged(int64_t dim, int64_t many) {
  auto v = drawn<T>(kRows * many * dim), out = unwritten<T>(kRows * dim);
  auto s = drawn_lse(kRows * many), lse = unwritten<float>(kRows);
  MergeStatesParams p{};
  p.in = states(v, s, dim, many), p.out = states(out, lse, dim);
  p.v_state = dim, p.s_state = 1, p.num_states = many, p.seq_len = kTokens, p.num_heads = kHeads, p.head_dim = dim;
  cpu::merge_states<T>(p);
  for (int64_t row = 0; row < kRows; ++row)
    check_merged(row, many, dim, &v[row * many * dim], &s[row * many], &out[row * dim], lse[row]);
  if (many != 2) return;
  auto pair = unwritten<T>(kRows * dim);
  auto pair_lse = unwritten<float>(kRows);
  MergeStateParams two{};
  two.a = two.b = p.in, two.out = states(pair, pair_lse, dim);
  two.b.v = &v[dim], two.b.s = &s[1];
  two.seq_len = kTokens, two.num_heads = kHeads, two.head_dim = dim;
  cpu::merge_state<T>(two);
  for (int64_t row = 0; row < kRows; ++row)
    check_merged(row, 2, dim, &v[row * 2 * dim], &s[row * 2], &pair[row * dim], pair_lse[row]);
}

void run() {
  for (const int64_t many : {1, 2, 19}) merged<float>(72, many), merged<half_t>(128, many), merged<bfloat16_t>(9, many);
}
