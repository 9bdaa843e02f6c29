// Multi-head latent attention on the CPU (DeepSeek-V2, arXiv 2405.04434): O = softmax(q_nope . ckv + q_pe .
// kpe) ckv. A tile of heads meets blocks of the cache. A row is packed as key and as value while it is in the
// first-level cache, so that memory is read once for both.
#pragma once

#include <type_traits>

#include <flashinfer/attention/mla.h>
#include <flashinfer/cpu/attention/prefill.h>

namespace flashinfer::cpu {

// Rows of a tile: at most as many as keep O and packed keys together in a core's second-level cache.
inline WorkLimits mla_limits(int64_t rows, int32_t tile_rows) {
  if (tile_rows == 0) tile_rows = rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  return {tile_rows, 4 * num_threads(), 4 * kPrefillKeys, kPrefillKeys};
}

// If products take pairs of bfloat16, 8-bit numbers are widened to it, which is exact. kWidens is false if
// latents or rotary keys have factors: products with bfloat16 numbers would be rounded, so queries and keys
// are floats.
template <typename T, typename KV>
constexpr bool kMlaWidens = kHasPairs && std::is_same_v<T, bfloat16_t> && sizeof(KV) == 1;
template <typename T, typename KV, bool kWidens>
using MlaTypes =
    AttentionTypes<std::conditional_t<!kWidens && sizeof(KV) == 1, float, T>,
                   std::conditional_t<kWidens, bfloat16_t, KV>, T, kMlaCkv + kMlaKpe, kMlaCkv, PosEncodingMode::kNone>;

template <typename T, typename KV, bool kWidens, typename Params>
struct MlaTile : PrefillBlocks<MlaVariant, MlaTypes<T, KV, kWidens>, Params> {
  using Blocks = PrefillBlocks<MlaVariant, MlaTypes<T, KV, kWidens>, Params>;
  using Blocks::scratch, Blocks::block, Blocks::count, Blocks::pairs, Blocks::kQ, Blocks::kPairs;
  using typename Blocks::Memory;

  MlaTile(const Params& params, const WorkItem& item, Memory& memory, Profiler<Params::kProfiler>& track)
      : Blocks(params, item, 0, memory, track) {
    track.begin(Event::kLoadQuery);
    for (int row = 0; row < this->rows; ++row) {
      const int64_t token = item.qo_start + this->query(row), head = this->head(row);
      const T* nope = static_cast<const T*>(params.q) + token * params.q_row + head * params.q_head;
      const T* pe = static_cast<const T*>(params.q_pe) + token * params.q_pe_row + head * params.q_pe_head;
      if constexpr (kPairs) {
        std::memcpy(pairs(scratch.q) + row * kQ, nope, kMlaCkv * sizeof(T));
        std::memcpy(pairs(scratch.q) + row * kQ + kMlaCkv, pe, kMlaKpe * sizeof(T));
      } else {
        float* to = scratch.q + row * kQ;
        const float scale = params.sm_scale_log2;
        for_lanes<kMlaCkv>([&](int d, int n) { store(to + d, load(nope + d, n) * scale); });
        for_lanes<kMlaKpe>(
            [&](int d, int n) { store(to + kMlaCkv + d, load(pe + d, n) * (scale * params.pe_factor)); });
      }
    }
    track.end(Event::kLoadQuery);
  }

  void run() {
    Blocks::run([this] { pack(); });
  }

 private:
  // Return a row as bfloat16: the row itself, or a copy in the worker's memory from number `at` on.
  template <int kDepth>
  const bfloat16_t* widened(const KV* row, int at) {
    if constexpr (std::is_same_v<KV, bfloat16_t>) {
      return row;
    } else {
      bfloat16_t* to = pairs(scratch.prepared) + at;
      for_lanes<kDepth>([&](int d, int) { store_rounded(to + d, load(row + d)); });
      return to;
    }
  }

  // Multiply latents by their scales, into the worker's memory from number `at` on.
  const float* scaled(const KV* row, int32_t key, int at) {
    int64_t page, slot;
    this->common.kv.locate(this->first, key, page, slot);
    const float* scales = this->params.scales_of(page, slot);
    float* to = scratch.prepared + at;
    for_lanes<kMlaCkv>([&](int d, int n) { store(to + d, load(row + d, n) * scales[d / kMlaScaleColumns]); });
    return to;
  }

  // Pack a block. Columns after the request's last key are zeros.
  void pack() {
    static const KV zeros[kMlaCkv] = {};
    const KV *ckv[kPrefillKeys], *kpe[kPrefillKeys];
    locate_rows(this->common.kv, true, 0, this->first, block, count, ckv);
    locate_rows(this->common.kv, false, 0, this->first, block, count, kpe);
    const int padded = round_up(count, kPanel);
    for (int t = count; t < padded; ++t) ckv[t] = kpe[t] = zeros;
    for (int t = 0; t < padded; t += kLanes) {
      const int64_t panel = t / kPanel * Memory::kKeyPanel;
      if constexpr (kPairs) {
        const bfloat16_t *latents[kLanes], *rotary[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          latents[i] = widened<kMlaCkv>(ckv[t + i], i * kQ);
          rotary[i] = widened<kMlaKpe>(kpe[t + i], i * kQ + kMlaCkv);
        }
        bfloat16_t* keys = pairs(scratch.k) + panel + 2 * (t % kPanel);
        pack_column_pairs<kMlaCkv>(latents, keys);
        pack_column_pairs<kMlaKpe>(rotary, keys + kMlaCkv * kPanel);
        for (int i = 0; i < kLanes; i += 2)
          pack_row_pairs<kMlaCkv>(latents[i], latents[i + 1], pairs(scratch.v) + (t + i) * kPanel, Memory::kValuePanel);
      } else {
        float* keys = scratch.k + panel + t % kPanel;
        pack_columns<kMlaKpe>(kpe + t, keys + kMlaCkv * kPanel);
        if constexpr (sizeof(KV) == 1) {
          if (this->params.ckv_scales) {
            const float* latents[kLanes];
            for (int i = 0; i < kLanes; ++i)
              latents[i] = t + i < count ? scaled(ckv[t + i], block + t + i, i * kQ) : no_latent();
            pack_latents(latents, t, keys);
            continue;
          }
        }
        pack_latents(ckv + t, t, keys);
      }
    }
  }

  // Pack latents as columns of keys and as rows of values.
  template <typename E>
  void pack_latents(const E* const* latents, int t, float* keys) {
    pack_columns<kMlaCkv>(latents, keys);
    for (int i = 0; i < kLanes; ++i) pack_row<kMlaCkv>(latents[i], scratch.v + (t + i) * kPanel, Memory::kValuePanel);
  }

  static const float* no_latent() {
    static constexpr float kZeros[kMlaCkv] = {};
    return kZeros;
  }
};

// Compute all items, then all merges. The result does not depend on the assignment to threads.
template <typename T, typename KV, bool kWidens, typename Params>
void mla_of(const Params& given) {
  const Params params = with_tracks(given);
  check_pages(params);
  const int64_t items = params.num_items();
  parallel_workers(items, [&](const auto& next, int64_t worker) {
    Profiler<Params::kProfiler> profiler(params, worker);
    PrefillScratch<MlaTypes<T, KV, kWidens>> scratch(params.tile_rows);
    for (int64_t task; (task = next()) < items;) {
      const WorkItem item = params.item(static_cast<int32_t>(task));
      profiler.begin(Event::kItem);
      MlaTile<T, KV, kWidens, Params>(params, item, scratch, profiler).run();
      profiler.end(Event::kItem);
    }
    profiler.finish();
  });
  merge_all<MlaVariant, MlaTypes<T, KV, kWidens>>(params);
}

template <typename T, typename KV, typename Params>
void mla(const Params& params) {
  if (params.pe_factor == 1.0f && !params.ckv_scales) return mla_of<T, KV, kMlaWidens<T, KV>>(params);
  if constexpr (sizeof(KV) == 1) mla_of<T, KV, false>(params);  // the binding refuses factors of other caches
}

}  // namespace flashinfer::cpu
