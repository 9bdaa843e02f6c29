// Host test of the tile borders of warpgroups: compare them with the mask of each row and key.
#include <flashinfer/attention/variants.h>
#include <flashinfer/cuda/attention/sm90/prefill.cuh>

#include <cstdio>

using namespace flashinfer;
using cuda::sm90::PrefillShape;
using cuda::sm90::TileRange;
using cuda::sm90::Work;

static int halves = 0;  // warpgroups that compute half of their last tile

// 0: right; else a number of what is wrong.
template <typename S>
static int wrong(const AttentionParams& params, Work work, int group) {
  const auto heads = static_cast<int32_t>(params.group.divisor);
  const int32_t first_row = work.row_start + 64 * group;
  int32_t rows =
      work.qo_len * heads < work.row_start + params.tile_rows ? work.qo_len * heads : work.row_start + params.tile_rows;
  if (first_row + 64 < rows) rows = first_row + 64;
  const Mask mask(params, work);
  const int32_t kv_start = work.kv_start, kv_end = work.kv_end;
  cuda::sm90::find_keys<S>(params, work);
  const TileRange range = cuda::sm90::tiles_of<S>(params, work, AttentionVariantBase(), group);
  const auto place = [&](int32_t key) { return key - work.first_key; };
  for (int32_t row = first_row; row < rows; ++row) {
    for (int32_t key = kv_start; key < kv_end; ++key) {
      if (!mask.sees(row / heads, key)) {
        if (place(key) >= 0 && range.is_whole(place(key) / S::kKeys)) return 1;
        continue;
      }
      const int32_t tile = place(key) / S::kKeys, in_tile = place(key) % S::kKeys;
      if (place(key) < 0 || tile < range.first || tile >= range.end || tile >= work.tiles) return 2;
      if (tile == range.end - 1 && in_tile >= range.left) return 3;
    }
  }
  if (range.end > range.first) {
    if (range.left <= 0 || range.left > S::kKeys) return 4;
    halves += range.left <= S::kHalfKeys;
  }
  return 0;
}

template <typename T, int kHeadDim>
static int check() {
  using S = PrefillShape<cuda::AttentionTypes<T, T, bfloat16_t, kHeadDim, kHeadDim, PosEncodingMode::kNone>>;
  static_assert(S::kHalfKeys < S::kKeys && S::kHalfKeys * 2 >= S::kKeys, "half of a tile");
  for (int heads : {1, 3, 4}) {
    for (int longer = 0; longer < S::kKeys + 17; ++longer) {
      for (int window : {-1, 0, 30, 64, 100, 131}) {
        for (bool causal : {false, true}) {
          AttentionParams params{};
          params.group = FastDiv(heads), params.mask_mode = causal ? MaskMode::kCausal : MaskMode::kNone;
          params.window_left = window, params.tile_rows = cuda::sm90::tile_rows<S>(heads);
          Work work{};
          work.qo_len = 210 / heads, work.kv_len = work.qo_len + longer, work.kv_end = work.kv_len;
          for (; work.row_start < work.qo_len * heads; work.row_start += params.tile_rows) {
            for (int part = 0; part < 2; ++part) {
              work.kv_start = part * 40;  // of keys that are split
              for (int group = 0; group < S::kConsumers; ++group) {
                if (const int what = wrong<S>(params, work, group))
                  return std::printf("%d: %d heads, %d keys more, window %d, causal %d, row %d + 64 * %d, part %d\n",
                                     what, heads, longer, window, causal, work.row_start, group, part),
                         1;
              }
            }
          }
        }
      }
    }
  }
  return 0;
}

int main() {
  if (check<bfloat16_t, 64>() || check<bfloat16_t, 128>() || check<fp8_e4m3_t, 128>()) return 1;
  std::printf("%d\n", halves);
  return 0;
}
