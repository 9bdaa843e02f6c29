// Rotary embedding with 8-bit results on the CPU: a token at a time per thread. Equations:
// common/rope_quant.h.
#pragma once

#include <string>

#include <flashinfer/common/rope_quant.h>
#include <flashinfer/cpu/page.h>
#include <flashinfer/cpu/rope.h>
#include <flashinfer/cpu/simd/quantize.h>

namespace flashinfer::cpu {

// Check the values of all index tensors before the first write.
inline void check_indices(const RopeQuantParams& p) {
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t position = p.pos_ids[token];
    if (position < 0 || position >= p.cache_size)
      throw_index(std::string(p.op) + ": pos_ids", token, position, 0, p.cache_size - 1);
  }
  if (p.pages.batch_indices) check_slots(p.pages);
}

template <typename T, typename Q>
inline void rotate_and_quantize(const RopeParams& p, const Angles<float>& angles, float scale, const T* in, Q* out) {
  const auto put = [&](int64_t i, vfloat x, int count) {
    store_quantized(out + i, rounded_to<T>(x) * splat(scale), count);
  };
  if (p.interleave) {
    for_lanes(p.rotary_dim, [&](int64_t i, int count) {
      const vfloat x = load(in + i, count);
      put(i, x * load(angles.cos + i, count) + swap_pairs(x) * load(angles.sin + i, count), count);
    });
  } else {
    const int64_t pairs = p.rotary_dim / 2;
    for_lanes(pairs, [&](int64_t i, int count) {
      const vfloat a = load(in + i, count), b = load(in + pairs + i, count);
      const vfloat c = load(angles.cos + i, count), s = load(angles.sin + i, count);
      put(i, a * c - b * s, count);
      put(pairs + i, b * c + a * s, count);
    });
  }
}

template <typename T, typename Q>
void rope_quant(const RopeQuantParams& p) {
  check_indices(p);
  RopeParams angles_of{};
  angles_of.rotary_dim = p.rotary_dim, angles_of.interleave = p.interleave, angles_of.pos_ids = p.pos_ids;
  angles_of.with_cache = true, angles_of.cos_sin_cache = p.cos_sin_cache, angles_of.cache_stride = p.cache_stride;
  int64_t bytes = 0;
  for (int i = 0; i < p.count; ++i)
    bytes += p.parts[i].heads * p.parts[i].dim * static_cast<int64_t>(sizeof(T) + sizeof(Q));
  parallel_rows(p.num_tokens, bytes, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
      const Angles<float> angles(angles_of, token);
      const Slot slot = p.pages.batch_indices ? find_slot(p.pages, token) : Slot{-1, 0};
      for (int i = 0; i < p.count; ++i) {
        const QuantHeads& part = p.parts[i];
        if (part.paged && slot.page < 0) continue;
        const int64_t at = part.paged ? slot.page * part.page_stride + slot.entry * part.output_token_stride
                                      : token * part.output_token_stride;
        const auto scale = part.scale.get_float();
        const T* in = static_cast<const T*>(part.input) + token * part.input_token_stride;
        Q* out = reinterpret_cast<Q*>(part.output) + at;
        for (int64_t head = 0; head < part.heads;
             ++head, in += part.input_head_stride, out += part.output_head_stride) {
          if (part.rotates) {
            rotate_and_quantize(angles_of, angles, scale, in, out);
          } else {
            for_lanes(part.dim, [&](int64_t j, int count) {
              store_quantized(out + j, load(in + j, count) * splat(scale), count);
            });
          }
        }
      }
    }
  });
}

}  // namespace flashinfer::cpu
