// Apply variants, masks and the online softmax to S in the fragments of a warp.
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

// Rows of a warp, and the keys that they may see. Element [m][n][i] of Products belongs to row 16 m + 8 (i /
// 2) + lane / 4 and to key 8 n + 2 (lane % 4) + i % 2.
template <typename S>
struct WarpRows {
  const AttentionParams& params;
  Mask mask;
  int32_t batch, head;     // KV head
  int32_t first, end_row;  // first row of the warp, end of the rows of the request
  int32_t kv_end;
  int32_t seen_start, seen_end;      // keys that at least one row of the warp may see
  int32_t common_start, common_end;  // keys that all rows see, unless the variant hides them

  // For variants without a window, and for callers that do not need the window.
  __device__ __forceinline__ WarpRows(const AttentionParams& p, const WorkItem& item, int32_t head_)
      : WarpRows(p, AttentionVariantBase(), item, head_) {}
  template <typename Variant>
  __device__ __forceinline__ WarpRows(const AttentionParams& p, const Variant& variant, const WorkItem& item,
                                      int32_t head_)
      : params(p), mask(p, item, head_), batch(item.batch), head(head_), kv_end(item.kv_end) {
    narrow(mask, variant);
    const int warp = threadIdx.x / 32 % S::kRowWarps;
    first = item.row_start + warp * 16 * S::kM, end_row = item.qo_len * static_cast<int32_t>(p.group.divisor);
    if (!active()) return;
    const int32_t last = min(first + 16 * S::kM, end_row) - 1;
    const auto first_qo = static_cast<int32_t>(p.group.div(first)), last_qo = static_cast<int32_t>(p.group.div(last));
    seen_start = mask.begin(first_qo), seen_end = min(mask.end(last_qo), kv_end);
    const bool ranges = mask.mode == MaskMode::kNone || mask.mode == MaskMode::kCausal;
    common_start = mask.begin(last_qo), common_end = ranges ? min(mask.end(first_qo), kv_end) : 0;
  }

  __device__ __forceinline__ bool active() const { return first < end_row; }
  __device__ __forceinline__ int32_t row(int m, int half) const {
    return first + 16 * m + 8 * half + static_cast<int32_t>(threadIdx.x % 32) / 4;
  }
  // Find the query token and head of a row. Rows after the last count as the last.
  __device__ __forceinline__ void locate(int32_t row, int32_t& qo_idx, int32_t& qo_head) const {
    uint32_t token, in_group;
    params.group.divmod(min(row, end_row - 1), token, in_group);
    qo_idx = static_cast<int32_t>(token);
    qo_head = head * static_cast<int32_t>(params.group.divisor) + static_cast<int32_t>(in_group);
  }
  __device__ __forceinline__ static int32_t key(int32_t tile_start, int n, int i) {
    return tile_start + 8 * n + 2 * static_cast<int32_t>(threadIdx.x % 4) + i % 2;
  }
};

// Accumulators of a warp: S of its rows and a tile of keys, and O of its rows.
template <typename S>
using Products = Accumulator<16 * S::kM, S::kKeys>;
template <typename S>
using Outputs = Accumulator<16 * S::kM, S::kDV>;

// Apply a variant to the logits of a tile. kWhole: all keys of the tile exist. kScale: also apply the scale
// of softmax. A variant is called only for existing rows and keys: it may use them as indices.
template <bool kWhole, bool kScale = true, typename Variant, typename S, typename P>
__device__ __forceinline__ void transform_tile(Products<S>& s, const P& params, const Variant& variant,
                                               const WarpRows<S>& warp, int32_t tile_start) {
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = warp.row(m, half);
      if (row >= warp.end_row) continue;
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

// Mask keys outside of each row's range. Use it for masks that are ranges of keys.
template <typename S>
__device__ __forceinline__ void mask_outside_ranges(Products<S>& s, const WarpRows<S>& warp, int32_t tile_start,
                                                    float masked_value) {
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
          s[m][n][i] = key >= start && key < end ? s[m][n][i] : masked_value;
        }
      }
    }
  }
}

// Set the bits of the visible elements of the lane's row `lane_row`, beginning with bit `bit`. The loop is
// not unrolled, because the code of masks is long.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void find_visible(uint64_t& seen, int bit, int lane_row, const P& params,
                                             const Variant& variant, const WarpRows<S>& warp, int32_t tile_start) {
  int32_t qo_idx, qo_head;
  warp.locate(warp.row(lane_row / 2, lane_row % 2), qo_idx, qo_head);
#pragma unroll 1
  for (int e = 0; e < 2 * S::kNKeys; ++e) {
    const int32_t key = warp.key(tile_start, e / 2, e);
    bool sees = key < warp.kv_end && warp.mask.sees(qo_idx, key);
    if constexpr (Variant::masks_logits)
      sees = sees && variant.LogitsMask(params, warp.batch, qo_idx, key, qo_head, warp.head);
    seen |= static_cast<uint64_t>(sees) << (bit + e);
  }
}

// Mask each element by its bit of a 64-bit word. If a lane has more than 64 elements, each of its rows has
// its own word: e4m3 tiles of 160 keys have 80 elements per lane.
template <typename Variant, typename S, typename P>
__device__ __forceinline__ void mask_elements(Products<S>& s, const P& params, const Variant& variant,
                                              const WarpRows<S>& warp, int32_t tile_start, float masked_value) {
  constexpr int kRowBits = 2 * S::kNKeys, kRows = 2 * S::kM;
  constexpr bool kOneWord = kRows * kRowBits <= 64;
  static_assert(kRowBits <= 64, "a word has a bit for each element of a row");
  uint64_t seen[kOneWord ? 1 : kRows] = {};
  if constexpr (kOneWord) {
#pragma unroll 1
    for (int lane_row = 0; lane_row < kRows; ++lane_row)
      find_visible(seen[0], lane_row * kRowBits, lane_row, params, variant, warp, tile_start);
  } else {
#pragma unroll
    for (int lane_row = 0; lane_row < kRows; ++lane_row)
      find_visible(seen[lane_row], 0, lane_row, params, variant, warp, tile_start);
  }
#pragma unroll
  for (int m = 0; m < S::kM; ++m) {
#pragma unroll
    for (int n = 0; n < S::kNKeys; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int lane_row = 2 * m + i / 2, bit = 2 * n + i % 2;
        const bool visible =
            kOneWord ? seen[0] >> (lane_row * kRowBits + bit) & 1 : seen[kOneWord ? 0 : lane_row] >> bit & 1;
        s[m][n][i] = visible ? s[m][n][i] : masked_value;
      }
    }
  }
}

template <typename Variant, typename S, typename P>
__device__ __forceinline__ void mask_tile(Products<S>& s, const P& params, const Variant& variant,
                                          const WarpRows<S>& warp, int32_t tile_start) {
  const float masked_value = Variant::use_softmax ? -math::inf : 0.0f;
  if constexpr (Variant::masks_logits) {
    mask_elements<Variant, S>(s, params, variant, warp, tile_start, masked_value);
  } else {
    if (tile_start >= warp.common_start && tile_start + S::kKeys <= warp.common_end) return;
    if (warp.mask.mode == MaskMode::kNone || warp.mask.mode == MaskMode::kCausal) {
      mask_outside_ranges<S>(s, warp, tile_start, masked_value);
    } else {
      mask_elements<Variant, S>(s, params, variant, warp, tile_start, masked_value);
    }
  }
}

// Return the sign by which queries are multiplied. It makes the scale of softmax positive, so the row maxima
// of S are also those of the scaled logits.
template <typename Variant>
__device__ __forceinline__ float query_sign(const Variant& variant) {
  if constexpr (!Variant::use_softmax || Variant::transforms_logits) {
    return 1.0f;
  } else {
    return variant.sm_scale_log2 < 0 ? -1.0f : 1.0f;
  }
}
// Return the scale of softmax. kApplied: if the variant transforms logits, transform_tile has already applied
// it (kScale), so return 1.
template <bool kApplied = true, typename Variant>
__device__ __forceinline__ float softmax_scale(const Variant& variant) {
  if constexpr (!Variant::use_softmax || (kApplied && Variant::transforms_logits)) {
    return 1.0f;
  } else {
    return fmaxf(fabsf(variant.sm_scale_log2), 1e-30f);  // 0 times -infinity would be NaN
  }
}

// Online softmax of a warp's rows (Milakov and Gimelshein, arXiv 1805.02867): P = 2^(scale * (s - row_max)),
// l = rowsum P. row_max is updated lazily, only if an element of P would exceed 2^kSlack. Most tiles then
// need no rescaling of O. The normalised result does not depend on row_max.
template <typename S>
struct OnlineSoftmax {
  static constexpr float kSlack = 8;
  float scale;
  float row_max[S::kM][2], sum[S::kM][2];  // sum: of this lane's elements

  __device__ __forceinline__ explicit OnlineSoftmax(float scale_) : scale(scale_) {
#pragma unroll
    for (int i = 0; i < 2 * S::kM; ++i) row_max[i / 2][i % 2] = -math::inf, sum[i / 2][i % 2] = 0;
  }

  __device__ __forceinline__ float base(int m, int half) const {
    return row_max[m][half] == -math::inf ? 0.0f : row_max[m][half] * scale;
  }

  // Replace S by P. Rescale `o`, the sum of earlier tiles, if row_max is raised.
  __device__ __forceinline__ void exponentiate(Products<S>& s, Outputs<S>& o) {
    float tile_max[S::kM][2];
    bool higher = false;
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        tile_max[m][half] = -math::inf;
#pragma unroll
        for (int n = 0; n < S::kNKeys; ++n)
          tile_max[m][half] = fmaxf(tile_max[m][half], fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        higher = higher || (tile_max[m][half] - row_max[m][half]) * scale > kSlack;
      }
    }
    if (__any_sync(kAllLanes, higher)) update_max(tile_max, o);
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = base(m, half);
#pragma unroll
        for (int n = 0; n < S::kNKeys; ++n) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            s[m][n][i] = math::ptx_exp2(fmaf(s[m][n][i], scale, -offset));
            sum[m][half] += s[m][n][i];
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void update_max(const float (&tile_max)[S::kM][2], Outputs<S>& o) {
#pragma unroll
    for (int m = 0; m < S::kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = row_max[m][half], now = fmaxf(old, quad_max(tile_max[m][half]));
        const float factor = now == old ? 1.0f : math::ptx_exp2((old - now) * scale);
        row_max[m][half] = now, sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < S::kNOut; ++n) o[m][n][2 * half] *= factor, o[m][n][2 * half + 1] *= factor;
      }
    }
  }
};

}  // namespace flashinfer::cuda
