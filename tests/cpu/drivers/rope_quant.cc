// Rotary embedding with an 8-bit result, of tokens and of slots of a paged cache.
#include <flashinfer/cpu/rope_quant.h>

#include "eight_bits.h"

using namespace driver;

constexpr int64_t kTokens = 7, kHeads = 3, kPositions = 40, kPageSize = 4;

// The first rotary_dim elements of a head are one part, the others a second. The keys go to slots: token t of
// one request to position t, and the last token to none.
template <typename T, typename Q>
void quantised(int64_t head_dim, int64_t rotary_dim, bool interleave) {
  const int64_t size = kTokens * kHeads * head_dim, pairs = rotary_dim / 2;
  const auto q = drawn<T>(size);
  auto out = unwritten<Q>(size), cache = unwritten<Q>(4 * kPageSize * kHeads * head_dim);
  const auto angles = drawn<float>(kPositions * rotary_dim);
  std::vector<int64_t> pos_ids(kTokens);
  for (int64_t& position : pos_ids) position = drawn_int(0, kPositions - 1);
  const std::vector<int32_t> requests = {0, 0, 0, 0, 0, 0, -1}, positions = {0, 1, 2, 3, 4, 5, -1};
  const std::vector<int32_t> indices = {3, 1}, indptr = {0, 2};
  const double scale[2] = {0.7, 30};
  RopeQuantParams p{};
  const int64_t row = kHeads * head_dim;
  for (int side = 0; side < 2; ++side) {
    for (int rest = 0; rest < 2; ++rest) {
      const int64_t start = rest ? rotary_dim : 0;
      Q* to = (side ? cache.data() : out.data()) + start;
      p.parts[p.count++] = {q.data() + start,
                            reinterpret_cast<uint8_t*>(to),
                            kHeads,
                            rest ? head_dim - rotary_dim : rotary_dim,
                            row,
                            head_dim,
                            row,
                            head_dim,
                            kPageSize * row,
                            {{scale[side], nullptr}, nullptr},
                            !rest,
                            side == 1};
    }
  }
  p.num_tokens = kTokens, p.rotary_dim = rotary_dim, p.interleave = interleave, p.pos_ids = {pos_ids.data(), true};
  p.cos_sin_cache = angles.data(), p.cache_size = kPositions, p.cache_stride = rotary_dim, p.op = "rope_quant";
  p.pages = {requests.data(), positions.data(), indices.data(), indptr.data(), kTokens, 2, 4, 1,
             kPageSize,       "rope_quant"};
  cpu::rope_quant<T, Q>(p);
  std::vector<bool> written(cache.size());
  for (int64_t at = 0; at < size; ++at) {
    const int64_t token = at / row, d = at % head_dim, pair = interleave ? d / 2 : d % pairs;
    double want = value(q[at]), error = 0;
    if (d < rotary_dim) {
      const bool first = interleave ? d % 2 == 0 : d < pairs;
      const int64_t other = at + (first ? 1 : -1) * (interleave ? 1 : pairs);
      const float* angle = angles.data() + pos_ids[token] * rotary_dim;
      const double a = want * angle[pair], b = value(q[other]) * angle[pairs + pair];
      want = first ? a - b : a + b,
      error = (std::fabs(a) + std::fabs(b)) * 1e-6 + (sizeof(T) == 2 ? std::fabs(want) / 250 : 0);
    }
    check_eight_bits("q", at, out[at], want * scale[0], error * scale[0]);
    if (token == kTokens - 1) continue;
    const int64_t slot = (indices[token / kPageSize] * kPageSize + token % kPageSize) * row + at % row;
    check_eight_bits("cache", at, cache[slot], want * scale[1], error * scale[1]);
    written[slot] = true;
  }
  for (size_t at = 0; at < cache.size(); ++at)
    if (!written[at]) check("not appended", static_cast<int64_t>(at), number_of(cache[at]), NAN, 0);
}

void run() {
  for (const bool interleave : {false, true}) {
    quantised<float, fp8_e4m3_t>(128, 128, interleave), quantised<half_t, fp8_e5m2_t>(80, 26, interleave);
    quantised<bfloat16_t, fp8_e4m3_t>(96, 64, interleave);
  }
}
