// Rotary embedding: pairs side by side and half a head apart.
#include <flashinfer/cpu/rope.h>

#include "harness.h"

using namespace driver;

template <typename T>
void rotated(int64_t head_dim, int64_t rotary_dim, bool interleave) {
  constexpr int64_t kTokens = 7, kHeads = 3;
  const int64_t size = kTokens * kHeads * head_dim;
  const auto q = drawn<T>(size), k = drawn<T>(size);
  auto q_out = unwritten<T>(size), k_out = unwritten<T>(size);
  std::vector<int32_t> positions(kTokens);
  for (int32_t& position : positions) position = drawn_int(0, 100000);
  RopeParams p{};
  const auto heads = [&](const std::vector<T>& in, std::vector<T>& out) {
    return RopeHeads{in.data(), out.data(), kHeads, kHeads * head_dim, head_dim, kHeads * head_dim, head_dim};
  };
  p.q = heads(q, q_out), p.k = heads(k, k_out);
  p.num_tokens = kTokens, p.head_dim = head_dim, p.rotary_dim = rotary_dim, p.interleave = interleave;
  p.pos_ids = {positions.data(), false};
  const int64_t pairs = rotary_dim / 2;
  for (int64_t i = 0; i < pairs; ++i)
    p.quarters[i] = std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim)) * M_2_PI;
  cpu::rope<T>(p);
  for (int64_t row = 0; row < kTokens * kHeads; ++row) {
    for (int64_t d = 0; d < head_dim; ++d) {
      const int64_t at = row * head_dim + d, pair = interleave ? d / 2 : d % pairs;
      double want = value(q[at]);
      if (d < rotary_dim) {
        const bool first = interleave ? d % 2 == 0 : d < pairs;
        const int64_t other = at + (first ? 1 : -1) * (interleave ? 1 : pairs);
        const double turns = std::remainder(p.quarters[pair] * positions[row / kHeads], 4.0) * M_PI_2;
        want = want * std::cos(turns) + (first ? -1 : 1) * value(q[other]) * std::sin(turns);
      }
      check_rounded("rope", at, q_out[at], want, 2e-6);
    }
  }
  for (int64_t at = 0; at < size; ++at) check("keys", at, std::isnan(value(k_out[at])), 0, 0);
}

void run() {
  for (const bool interleave : {false, true}) {
    rotated<float>(128, 128, interleave), rotated<half_t>(80, 80, interleave), rotated<bfloat16_t>(96, 26, interleave);
  }
}
