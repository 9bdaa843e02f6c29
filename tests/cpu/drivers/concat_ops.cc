// Keys of MLA from their two parts, between guard bytes.
#include <flashinfer/cpu/concat_ops.h>

#include "harness.h"

using namespace driver;

void run() {
  for (int round = 0; round < 12; ++round) {
    const int64_t tokens = drawn_int(0, 5), heads = drawn_int(1, 3), nope = 16 * drawn_int(1, 3), rope = 16;
    const int64_t row = nope + rope, gap = 16 * drawn_int(0, 1);
    const auto bytes = [](int64_t count) {
      std::vector<uint8_t> result(count);
      for (uint8_t& one : result) one = static_cast<uint8_t>(drawn_int(0, 255));
      return result;
    };
    const auto from = bytes(tokens * heads * nope), shared = bytes(tokens * (rope + gap));
    std::vector<uint8_t> k(tokens * heads * (row + gap) + gap, 0xa5);
    ConcatMlaParams p{};
    p.k = reinterpret_cast<char*>(k.data());
    p.nope = reinterpret_cast<const char*>(from.data()), p.rope = reinterpret_cast<const char*>(shared.data());
    p.k_head_stride = row + gap, p.k_token_stride = heads * p.k_head_stride;
    p.nope_head_stride = nope, p.nope_token_stride = heads * nope, p.rope_token_stride = rope + gap;
    p.nope_bytes = nope, p.rope_bytes = rope, p.tokens = tokens, p.heads = heads;
    cpu::concat_mla_k(p);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const uint8_t* to = k.data() + t * p.k_token_stride + h * p.k_head_stride;
        for (int64_t i = 0; i < nope; ++i) check("nope", i, to[i], from[(t * heads + h) * nope + i], 0);
        for (int64_t i = 0; i < rope; ++i) check("rope", i, to[nope + i], shared[t * (rope + gap) + i], 0);
        for (int64_t i = 0; i < gap; ++i) check("gap", i, to[row + i], 0xa5, 0);
      }
    }
    for (int64_t i = tokens * p.k_token_stride; i < static_cast<int64_t>(k.size()); ++i) check("end", i, k[i], 0xa5, 0);
  }
}
