// Verification of draft tokens on the CPU: accept in order, then draw one token from the rest of the target.
#pragma once

#include <flashinfer/cpu/sampling/sample.h>

namespace flashinfer::cpu {

inline void add(void* to, bool wide, int64_t at, int64_t count) {
  wide ? void(static_cast<int64_t*>(to)[at] += count)
       : void(static_cast<int32_t*>(to)[at] += static_cast<int32_t>(count));
}

// Draw from relu(target - draft), or from the target if that is nowhere positive or there is no draft. Return
// 0 for an invalid row.
inline int64_t draw_rest(const Source& target, const Source* draft, uint64_t uniform, Row& row) {
  load_probs(row, target);
  if (draft) {
    Row rest = row;
    for_chunks(*draft, 0.0f, [&](int64_t c, const float* at) {
      const float* from = row.chunk(c);
      float* to = rest.own_chunk(c);
      rest.sums[c] = chunk_sum([&](int i) {
        const vfloat left = max(splat(0), load(from + i) - max(splat(0), load(at + i)));
        store(to + i, left);
        return left;
      });
    });
    rest.borrowed_chunks = 0;
    if (Mass::of(rest.sums).valid) std::swap(row, rest);
  }
  Drawable d;
  d.sums = row.sums;
  d.finish(Mass::of(d.sums));
  if (!d.mass.valid) return 0;
  const auto [c, share] = d.find(uniform);
  return c * kSumChunk + find_in_chunk(row.chunk(c), target.count(c), share, d.mass.fixed, 0.0f);
}

inline bool accepts(const ChainParams& p, int64_t request, int64_t j, const Source& draft, const Source& target) {
  const int64_t token = p.draft_token(request, j);
  if (token < 0 || token >= p.vocab_size) return false;
  const double u = static_cast<double>(p.random.draw(request, static_cast<uint32_t>(1 + j))) * 0x1p-53;
  return u * static_cast<double>(draft.at(token)) < static_cast<double>(target.at(token));
}

inline void chain_sample(const ChainParams& p, const Format& format) {
  const int64_t n = p.num_draft;
  const auto drafts = [&](int64_t b, int64_t j) {
    return Source::of(p.draft, b * p.draft_batch_stride + j * p.draft.stride, format, p.vocab_size);
  };
  const auto targets = [&](int64_t b, int64_t j) {
    return Source::of(p.target, b * p.target_batch_stride + j * p.target.stride, format, p.vocab_size);
  };
  parallel_rows(p.batch_size, 2 * p.vocab_size * format.size, [&](int64_t first, int64_t last) {
    Row& row = own_drawable().row;
    for (int64_t b = first; b < last; ++b) {
      int64_t emitted = n, accepted = 0;
      for (int64_t j = 0; j < n; ++j) {
        const bool passes = accepts(p, b, j, drafts(b, j), targets(b, j));
        accepted += passes;
        if (!passes && emitted == n) emitted = j;
      }
      int32_t* tokens = p.tokens + b * (n + 1);
      for (int64_t j = 0; j <= n; ++j) tokens[j] = j < emitted ? static_cast<int32_t>(p.draft_token(b, j)) : -1;
      const Source draft = drafts(b, std::min(emitted, n - 1));
      tokens[emitted] = static_cast<int32_t>(
          draw_rest(targets(b, emitted), emitted < n ? &draft : nullptr, p.random.draw(b, 0), row));
      add(p.accepted, p.wide_accepted, b, accepted);
      add(p.emitted, p.wide_emitted, b, emitted);
    }
  });
}

}  // namespace flashinfer::cpu
