// What happens to the products of queries and keys: a variant's transform, masks, and softmax as keys come.
#pragma once

#include <cmath>
#include <cstdint>

#include <flashinfer/attention/mask.h>
#include <flashinfer/attention/math.h>
#include <flashinfer/attention/params.h>
#include <flashinfer/attention/variant.h>
#include <flashinfer/cuda/attention/shape.cuh>
#include <flashinfer/cuda/tile/fragment.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

// The rows of a warp and the keys they may see. Element i of fragment n of products belongs to row
// 16 m + 8 (i / 2) + lane / 4 and to key 8 n + 2 (lane % 4) + i % 2.
template <typename S>
struct WarpRows {
  const AttentionParams& params;
  Mask mask;
  int32_t batch, head;  // key head
  int32_t first, rows;  // first of the warp, and those of the request
  int32_t kv_end;
  int32_t seen_start, seen_end;      // keys that some row of the warp may see
  int32_t shared_start, shared_end;  // keys that all of them see, unless the variant hides them

  // Of a variant that has no window, or none that matters here.
  __device__ __forceinline__ WarpRows(const AttentionParams& p, const WorkItem& item, int32_t head_)
      : WarpRows(p, AttentionVariantBase(), item, head_) {}
  template <typename Variant>
  __device__ __forceinline__ WarpRows(const AttentionParams& p, const Variant& variant, const WorkItem& item,
                                      int32_t head_)
      : params(p), mask(p, item, head_), batch(item.batch), head(head_), kv_end(item.kv_end) {
    narrow(mask, variant);
    const int warp = threadIdx.x / 32 % S::kRowWarps;
    first = item.row_start + warp * 16 * S::kM, rows = item.qo_len * static_cast<int32_t>(p.group.divisor);
    if (!active()) return;
    const int32_t last = min(first + 16 * S::kM, rows) - 1;
    const auto first_qo = static_cast<int32_t>(p.group.div(first)), last_qo = static_cast<int32_t>(p.group.div(last));
    seen_start = mask.begin(first_qo), seen_end = min(mask.end(last_qo), kv_end);
    const bool ranges = mask.mode == MaskMode::kNone || mask.mode == MaskMode::kCausal;
    shared_start = mask.begin(last_qo), shared_end = ranges ? min(mask.end(first_qo), kv_end) : 0;
  }

  __device__ __forceinline__ bool active() const { return first < rows; }
  __device__ __forceinline__ int32_t row(int m, int half) const {
    return first + 16 * m + 8 * half + static_cast<int32_t>(threadIdx.x % 32) / 4;
  }
  // The query token and head of a row; rows behind the last are taken for it.
  __device__ __forceinline__ void locate(int32_t row, int32_t& qo_idx, int32_t& qo_head) const {
    uint32_t token, in_group;
    params.group.divmod(min(row, rows - 1), token, in_group);
    qo_idx = static_cast<int32_t>(token);
    qo_head = head * static_cast<int32_t>(params.group.divisor) + static_cast<int32_t>(in_group);
  }
  __device__ __forceinline__ static int32_t key(int32_t tile_start, int n, int i) {
    return tile_start + 8 * n + 2 * static_cast<int32_t>(threadIdx.x % 4) + i % 2;
  }
};

// Products of a warp's rows with a tile of keys, and what the weights of all keys give of the values.
template <typename S>
using Products = Accumulator<16 * S::kM, S::kKeys>;
template <typename S>
using Outputs = Accumulator<16 * S::kM, S::kDV>;

// kWhole: all keys of the tile are there. kScale: the scale of softmax is applied as well. A variant is not asked about
// rows and keys that are not: it may look them up.
template <bool kWhole, bool kScale = true, typename Variant, typename S, typename P>
__device__ __forceinline__ void transform_tile(Products<S>& s, const P& params, const Variant& variant,
                                               const WarpRows<S>& warp, int32_t tile_start) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = warp.row(m, half);
      if (row >= warp.rows) continue;
      int32_t qo_idx, qo_head;
      warp.locate(row, qo_idx, qo_head);
#pragma unroll
      for (int n = 0; n < S::kNKeys; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int32_t key = warp.key(tile_start, n, i);
          if (!kWhole && key >= warp.kv_end) continue;
          s[m][n][i] = variant.LogitsTransform(params, s[m][n][i], warp.batch, qo_idx, key, qo_head, warp.head);
          if constexpr (kScale && Variant::use_softmax) s[m][n][i] *= static_cast<float>(variant.sm_scale_log2);
        }
      }
    }
  }
}

template <typename Variant, typename S, typename P>
__device__ __forceinline__ void transform_logits(Products<S>& s, const P& params, const Variant& variant,
                                                 const WarpRows<S>& warp, int32_t tile_start) {
  if (tile_start + S::kKeys <= warp.kv_end) {
    transform_tile<true>(s, params, variant, warp, tile_start);
  } else {
    transform_tile<false>(s, params, variant, warp, tile_start);
  }
}

// Hides what a mask of ranges hides: each row sees the keys of one range.
template <typename S>
__device__ __forceinline__ void hide_outside_ranges(Products<S>& s, const WarpRows<S>& warp, int32_t tile_start,
                                                    float hidden) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto qo_idx = static_cast<int32_t>(warp.params.group.div(warp.row(m, half)));
      const int32_t start = warp.mask.begin(qo_idx), end = min(warp.mask.end(qo_idx), warp.kv_end);
#pragma unroll
      for (int n = 0; n < S::kNKeys; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const int32_t key = warp.key(tile_start, n, i);
          s[m][n][i] = key >= start && key < end ? s[m][n][i] : hidden;
        }
      }
    }
  }
}

// Sets the bits from number `bit` on of the visible ones among this lane's elements of a row: number `part` of its
// rows. The loop is not unrolled, because masks are much code.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void find_visible(uint64_t& seen, int bit, int part, const P& params, const Variant& variant,
                                             const WarpRows<S>& warp, int32_t tile_start) {
  int32_t qo_idx, qo_head;
  warp.locate(warp.row(part / 2, part % 2), qo_idx, qo_head);
#pragma unroll 1
  for (int e = 0; e < 2 * S::kNKeys; ++e) {
    const int32_t key = warp.key(tile_start, e / 2, e);
    bool sees = key < warp.kv_end && warp.mask.sees(qo_idx, key);
    if constexpr (Variant::masks_logits)
      sees = sees && variant.LogitsMask(params, warp.batch, qo_idx, key, qo_head, warp.head);
    seen |= static_cast<uint64_t>(sees) << (bit + e);
  }
}

// Hides element by element, from one word with a bit for each element, or from a word for each row where one word is
// too short: e4m3 tiles of 160 keys have 80 elements a lane.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void hide_elements(Products<S>& s, const P& params, const Variant& variant,
                                              const WarpRows<S>& warp, int32_t tile_start, float hidden) {
  constexpr int kRowBits = 2 * S::kNKeys, kRows = 2 * S::kM;
  constexpr bool kOneWord = kRows * kRowBits <= 64;
  static_assert(kRowBits <= 64, "a word has a bit for each element of a row");
  uint64_t seen[kOneWord ? 1 : kRows] = {};
  if constexpr (kOneWord) {
#pragma unroll 1
    for (int part = 0; part < kRows; ++part)
      find_visible(seen[0], part * kRowBits, part, params, variant, warp, tile_start);
  } else {
#pragma unroll
    for (int part = 0; part < kRows; ++part) find_visible(seen[part], 0, part, params, variant, warp, tile_start);
  }
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int n = 0; n < S::kNKeys; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int part = 2 * m + i / 2, bit = 2 * n + i % 2;
        const bool visible = kOneWord ? seen[0] >> (part * kRowBits + bit) & 1 : seen[kOneWord ? 0 : part] >> bit & 1;
        s[m][n][i] = visible ? s[m][n][i] : hidden;
      }
    }
  }
}

template <typename Variant, typename S, typename P>
__device__ __forceinline__ void hide(Products<S>& s, const P& params, const Variant& variant, const WarpRows<S>& warp,
                                     int32_t tile_start) {
  const float hidden = Variant::use_softmax ? -math::inf : 0.0f;
  if constexpr (Variant::masks_logits) {
    hide_elements<Variant, S>(s, params, variant, warp, tile_start, hidden);
  } else {
    if (tile_start >= warp.shared_start && tile_start + S::kKeys <= warp.shared_end) return;
    if (warp.mask.mode == MaskMode::kNone || warp.mask.mode == MaskMode::kCausal) {
      hide_outside_ranges<S>(s, warp, tile_start, hidden);
    } else {
      hide_elements<Variant, S>(s, params, variant, warp, tile_start, hidden);
    }
  }
}

// A factor of the queries that makes the scale of softmax positive: its maxima are then those of the products.
template <typename Variant>
__device__ __forceinline__ float query_sign(const Variant& variant) {
  if constexpr (!Variant::use_softmax || Variant::transforms_logits) {
    return 1.0f;
  } else {
    return variant.sm_scale_log2 < 0 ? -1.0f : 1.0f;
  }
}
// kApplied: that of transformed logits is a part of them.
template <bool kApplied = true, typename Variant>
__device__ __forceinline__ float softmax_scale(const Variant& variant) {
  if constexpr (!Variant::use_softmax || (kApplied && Variant::transforms_logits)) {
    return 1.0f;
  } else {
    return fmaxf(fabsf(variant.sm_scale_log2), 1e-30f);  // 0 times -infinity would be NaN
  }
}

// Softmax of a warp's rows: sums of 2^(scale * (s - reference)), and outputs weighted alike. The reference of a row is
// a maximum, but not always of all keys so far: it is raised only when a weight would pass 2^kSlack, which spares most
// tiles the correction of the outputs. The result is the same whatever the reference.
template <typename S>
struct OnlineSoftmax {
  static constexpr float kSlack = 8;
  float scale;
  float reference[S::kM][2], sum[S::kM][2];  // sum: of this lane's elements

  __device__ __forceinline__ explicit OnlineSoftmax(float scale_) : scale(scale_) {
#pragma unroll
    for (int i = 0; i < 2 * S::kM; ++i) reference[i / 2][i % 2] = -math::inf, sum[i / 2][i % 2] = 0;
  }

  __device__ __forceinline__ float base(int m, int half) const {
    return reference[m][half] == -math::inf ? 0.0f : reference[m][half] * scale;
  }

  // Products become weights; `o` is what the weights of earlier keys gave.
  __device__ __forceinline__ void weigh(Products<S>& s, Outputs<S>& o) {
    float top[S::kM][2];
    bool higher = false;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = -math::inf;
#pragma unroll
        for (int n = 0; n < S::kNKeys; ++n)
          top[m][half] = fmaxf(top[m][half], fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        higher = higher || (top[m][half] - reference[m][half]) * scale > kSlack;
      }
    }
    if (__any_sync(kAllLanes, higher)) raise(top, o);
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float below = base(m, half);
#pragma unroll
        for (int n = 0; n < S::kNKeys; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = math::ptx_exp2(fmaf(s[m][n][i], scale, -below));
            sum[m][half] += s[m][n][i];
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void raise(const float (&top)[S::kM][2], Outputs<S>& o) {
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = reference[m][half], now = fmaxf(old, quad_max(top[m][half]));
        const float share = now == old ? 1.0f : math::ptx_exp2((old - now) * scale);
        reference[m][half] = now, sum[m][half] *= share;
#pragma unroll
        for (int n = 0; n < S::kNOut; ++n) o[m][n][2 * half] *= share, o[m][n][2 * half + 1] *= share;
      }
    }
  }
};

}  // namespace flashinfer::cuda
