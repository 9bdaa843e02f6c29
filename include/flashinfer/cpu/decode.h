// Attention of few queries: every key and value is read once, where it stands in the cache, for all the query heads
// that use it. As fast as memory is.
#pragma once

#include <flashinfer/attention/config.h>
#include <flashinfer/cpu/attention.h>

namespace flashinfer::cpu {

constexpr int kDecodeKeys = 64;  // of a block

inline WorkLimits decode_limits(int64_t rows, int32_t tile_rows) {
  if (tile_rows == 0) tile_rows = rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
  return {tile_rows, 4 * num_threads(), 4 * kDecodeKeys, kDecodeKeys};
}

// Products of kRows queries, kStride numbers apart, with `count` keys to rows of logits; whole vectors are written.
template <int kRows, int kDepth, int kStride, typename T>
inline void dot_products(const float* q, const T* const* keys, int count, float* logits) {
  constexpr int kKeys = kLanes / kRows;
  for (int t = 0; t < count; t += kKeys) {
    vfloat sums[kLanes] = {};
    const auto add = [&](int d, int width) {
      vfloat queries[kRows];
      for (int row = 0; row < kRows; ++row) queries[row] = load(q + row * kStride + d);
      for (int i = 0; i < kKeys; ++i) {
        const vfloat key = load(keys[t + i] + d, width);
        for (int row = 0; row < kRows; ++row) sums[row * kKeys + i] += queries[row] * key;
      }
    };
    for (int d = 0; d + kLanes <= kDepth; d += kLanes) add(d, kLanes);
    if constexpr (kDepth % kLanes != 0) add(kDepth / kLanes * kLanes, kDepth % kLanes);
    const vfloat products = sums_of(sums);
    float each[kLanes];
    store(each, products);
    for (int row = 0; row < kRows; ++row)
      std::memcpy(logits + row * kDecodeKeys + t, each + row * kKeys, kKeys * sizeof(float));
  }
}

// Elements [d, d + kWidth) of the sums of kRows rows, kStride numbers apart: sums * factor + weights x values.
template <int kRows, int kWidth, int kStride, typename T>
inline void add_values(const float* weights, const T* const* values, int from, int to, int d, const float* factor,
                       float* sums) {
  constexpr int kVectors = (kWidth + kLanes - 1) / kLanes;
  vfloat added[kRows][kVectors] = {};
  for (int t = from; t < to; ++t) {
    vfloat value[kVectors];
    for (int v = 0; v < kVectors; ++v)
      value[v] = load(values[t] + d + v * kLanes, kWidth - v * kLanes < kLanes ? kWidth - v * kLanes : kLanes);
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kVectors; ++v) added[row][v] += value[v] * weights[row * kDecodeKeys + t];
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to_sum = sums + row * kStride + d + v * kLanes;
      store(to_sum, load(to_sum) * factor[row] + added[row][v]);
    }
  }
}

template <int kRows, int kDim, int kStride, typename T>
inline void add_rows(const float* weights, const T* const* values, int from, int to, const float* factor, float* sums) {
  constexpr int kChunk = (kLanes == 4 ? 2 : 4) * kLanes, kRest = kDim % kChunk;
  for (int d = 0; d + kChunk <= kDim; d += kChunk)
    add_values<kRows, kChunk, kStride>(weights, values, from, to, d, factor, sums);
  if constexpr (kRest != 0) add_values<kRows, kRest, kStride>(weights, values, from, to, kDim - kRest, factor, sums);
}

// Calls body(row, constant of 4, 2 or 1) for groups of that many rows that make up [0, rows).
template <typename Body>
inline void for_rows(int rows, const Body& body) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  if (row + 2 <= rows) body(row, std::integral_constant<int, 2>{}), row += 2;
  if (row < rows) body(row, std::integral_constant<int, 1>{});
}

// Memory of a worker.
template <typename Types>
struct DecodeScratch {
  static constexpr int kKeyStride = Types::kQueryStride;

  Scratch memory;
  float *q, *logits, *sums, *keys;
  SoftmaxState state;

  explicit DecodeScratch(int rows)
      : memory(int64_t{rows} * (Types::kQueryStride + kDecodeKeys + Types::kSumStride + 3) +
               kDecodeKeys * int64_t{kKeyStride}),
        q(memory.take(int64_t{rows} * Types::kQueryStride)),
        logits(memory.take(int64_t{rows} * kDecodeKeys)),
        sums(memory.take(int64_t{rows} * Types::kSumStride)),
        keys(memory.take(kDecodeKeys * int64_t{kKeyStride})),
        state(memory, rows) {}
};

template <typename Variant, typename Types, typename Params>
void decode_item(const Params& params, const WorkItem& item, int32_t kv_head,
                 const Rotation<Types::HEAD_DIM_QK>* rotation, DecodeScratch<Types>& scratch) {
  using KV = typename Types::DTypeKV;
  constexpr int kDQ = Types::HEAD_DIM_QK, kQ = Types::kQueryStride, kSums = Types::kSumStride;
  using Rows = Tile<Variant, Types, Params>;
  const Rows tile(params, item, kv_head);
  tile.load_queries(scratch.q, rotation);
  scratch.state.reset(tile.rows);
  std::memset(scratch.sums, 0, sizeof(float) * tile.rows * kSums);
  const KeyRange keys = tile.visible();
  for (int32_t block = keys.begin; block < keys.end; block += kDecodeKeys) {
    const int count = keys.end - block < kDecodeKeys ? keys.end - block : kDecodeKeys;
    const int whole = round_up(count, kLanes);
    const KV *k[kDecodeKeys], *v[kDecodeKeys];
    locate_rows(tile.common.kv, true, kv_head * tile.common.kv.k_head, tile.first, block, count, k);
    locate_rows(tile.common.kv, false, kv_head * tile.common.kv.v_head, tile.first, block, count, v);
    const float* prepared[kDecodeKeys];
    if constexpr (Rows::kPreparesKeys) {
      tile.prepare_keys(k, block, count, scratch.keys, rotation);
      for (int t = 0; t < whole; ++t) prepared[t] = scratch.keys + (t < count ? t : count - 1) * kQ;
    } else {
      for (int t = count; t < whole; ++t) k[t] = k[count - 1];  // products that nobody sees
    }
    for_rows(tile.rows, [&](int row, auto number) {
      float *q = scratch.q + row * kQ, *logits = scratch.logits + row * kDecodeKeys;
      if constexpr (Rows::kPreparesKeys) {
        dot_products<number, kDQ, kQ>(q, prepared, count, logits);
      } else {
        dot_products<number, kDQ, kQ>(q, k, count, logits);
      }
    });
    for (int row = 0; row < tile.rows; ++row)
      tile.weigh(row, scratch.logits + row * kDecodeKeys, block, count, 0, whole, scratch.state);
    for_rows(tile.rows, [&](int row, auto number) {
      add_rows<number, Types::HEAD_DIM_VO, kSums>(scratch.logits + row * kDecodeKeys, v, 0, count,
                                                  scratch.state.factor + row, scratch.sums + row * kSums);
    });
  }
  for (int row = 0; row < tile.rows; ++row) tile.finish(row, scratch.sums + row * kSums, scratch.state);
}

// All items, then all merges. Which thread does what does not matter to the result.
template <typename Variant, typename Types, typename Params>
void decode(const Params& params) {
  const AttentionParams& common = params;
  check_pages(common);
  std::unique_ptr<const Rotation<Types::HEAD_DIM_QK>> rotation;
  if constexpr (Types::kRope)
    rotation.reset(new Rotation<Types::HEAD_DIM_QK>(common.rope_rcp_scale, common.rope_rcp_theta));
  const int64_t heads = common.num_kv_heads, tasks = common.num_items() * heads;
  parallel_tasks(tasks, [&](const auto& next) {
    DecodeScratch<Types> scratch(common.tile_rows);
    for (int64_t task; (task = next()) < tasks;)
      decode_item<Variant, Types>(params, common.item(static_cast<int32_t>(task / heads)),
                                  static_cast<int32_t>(task % heads), rotation.get(), scratch);
  });
  merge_all<Variant, Types>(params);
}

}  // namespace flashinfer::cpu
