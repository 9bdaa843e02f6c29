// Attention of few queries: every key and value is read once, where it stands in the cache, for all the query heads
// that use it. As fast as memory is.
#pragma once

#include <algorithm>

#include <flashinfer/attention/config.h>
#include <flashinfer/cpu/attention/tile.h>

namespace flashinfer::cpu {

constexpr int kDecodeKeys = 64;  // of a block

// Heads that one task does side by side: those of a token stand side by side in most caches, and memory is faster where
// it is read in long pieces. Two blocks of their keys and values fit the second level cache.
inline int32_t heads_of_task(int64_t row_bytes) {
  return row_bytes > 2048 ? 1 : static_cast<int32_t>(2048 / row_bytes);
}

inline WorkLimits decode_limits(const AttentionConfig& config, int64_t rows, int32_t tile_rows) {
  if (tile_rows == 0) tile_rows = rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
  const int32_t heads = heads_of_task(config.head_dim_qk * size_of(config.kv));
  return {tile_rows, 4 * num_threads() * heads, 4 * kDecodeKeys, kDecodeKeys};
}

// Asks for a row that will be read soon. The hardware cannot guess it: the row after this one is of another page.
template <int kDim, typename T>
inline void prefetch_row(const T* row) {
  for (int d = 0; d < kDim; d += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(row + d, 0, 2);
}

// Products of kRows queries, kStride numbers apart, with `count` keys to rows of logits; whole vectors are written.
// `soon`: where as many rows of kSoon elements are that will be needed, or null.
template <int kRows, int kDepth, int kStride, int kSoon, typename T, typename Soon>
inline void dot_products(const float* q, const T* const* keys, int64_t offset, int count, float* logits,
                         const Soon* const* soon) {
  constexpr int kKeys = kLanes / kRows;
  for (int t = 0; t < count; t += kKeys) {
    if (soon)
      for (int i = 0; i < kKeys; ++i) prefetch_row<kSoon>(soon[t + i]);
    vfloat sums[kLanes] = {};
    const auto add = [&](int d, int width) {
      vfloat queries[kRows];
      for (int row = 0; row < kRows; ++row) queries[row] = load(q + row * kStride + d);
      for (int i = 0; i < kKeys; ++i) {
        const vfloat key = load(keys[t + i] + offset + d, width);
        for (int row = 0; row < kRows; ++row) sums[row * kKeys + i] += queries[row] * key;
      }
    };
    for (int d = 0; d + kLanes <= kDepth; d += kLanes) add(d, kLanes);
    if constexpr (kDepth % kLanes != 0) add(kDepth / kLanes * kLanes, kDepth % kLanes);
    float products[kLanes];
    store(products, sums_of(sums));
    for (int row = 0; row < kRows; ++row)
      std::memcpy(logits + row * kDecodeKeys + t, products + row * kKeys, kKeys * sizeof(float));
  }
}

// Elements [d, d + kWidth) of the sums of kRows rows, kStride numbers apart: sums * factor + weights x values.
template <int kRows, int kWidth, int kStride, int kSoon, typename T>
inline void add_values(const float* weights, const T* const* values, int64_t offset, int count, const float* factor,
                       float* sums, const T* const* soon) {
  constexpr int kVectors = (kWidth + kLanes - 1) / kLanes;
  vfloat added[kRows][kVectors] = {};
  for (int t = 0; t < count; ++t) {
    if (soon) prefetch_row<kSoon>(soon[t]);
    vfloat value[kVectors];
    for (int v = 0; v < kVectors; ++v)
      value[v] = load(values[t] + offset + v * kLanes, kWidth - v * kLanes < kLanes ? kWidth - v * kLanes : kLanes);
    for (int row = 0; row < kRows; ++row)
      for (int v = 0; v < kVectors; ++v) added[row][v] += value[v] * weights[row * kDecodeKeys + t];
  }
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + row * kStride + v * kLanes;
      store(to, load(to) * factor[row] + added[row][v]);
    }
  }
}

template <int kRows, int kDim, int kStride, typename T>
inline void add_rows(const float* weights, const T* const* values, int64_t offset, int count, const float* factor,
                     float* sums, const T* const* soon) {
  constexpr int kChunk = (kLanes == 4 ? 2 : 4) * kLanes, kRest = kDim % kChunk;
  for (int d = 0; d + kChunk <= kDim; d += kChunk)
    add_values<kRows, kChunk, kStride, kDim>(weights, values, offset + d, count, factor, sums + d,
                                             d == 0 ? soon : nullptr);
  if constexpr (kRest != 0)
    add_values<kRows, kRest, kStride, kDim>(weights, values, offset + kDim - kRest, count, factor, sums + kDim - kRest,
                                            kDim == kRest ? soon : nullptr);
}

// Calls body(row, constant of 4, 2 or 1) for groups of that many rows that make up [0, rows).
template <typename Body>
inline void for_rows(int rows, const Body& body) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>{});
  if (row + 2 <= rows) body(row, std::integral_constant<int, 2>{}), row += 2;
  if (row < rows) body(row, std::integral_constant<int, 1>{});
}

// Memory of a worker: queries, sums and the softmax of all rows of all heads of a task, and one head's logits.
template <typename Types>
struct DecodeScratch {
  const int rows;
  Scratch memory;
  float *q, *logits, *sums, *keys;
  SoftmaxState state;

  DecodeScratch(int tile_rows, int heads)
      : rows(tile_rows),
        memory(int64_t{tile_rows} * (heads * (Types::kQueryStride + Types::kSumStride + 3) + kDecodeKeys) +
               kDecodeKeys * int64_t{Types::kQueryStride}),
        q(memory.take(int64_t{tile_rows} * heads * Types::kQueryStride)),
        logits(memory.take(int64_t{tile_rows} * kDecodeKeys)),
        sums(memory.take(int64_t{tile_rows} * heads * Types::kSumStride)),
        keys(memory.take(kDecodeKeys * int64_t{Types::kQueryStride})),
        state(memory, tile_rows * heads) {}
};

// A work item of heads [first_head, first_head + heads).
template <typename Variant, typename Types, typename Params>
struct DecodeTile : Tile<Variant, Types, Params> {
  using Base = Tile<Variant, Types, Params>;
  using KV = typename Types::DTypeKV;
  using Rotary = Rotation<Types::HEAD_DIM_QK>;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;
  static constexpr int kQ = Types::kQueryStride, kSums = Types::kSumStride;

  DecodeScratch<Types>& scratch;
  const Rotary* rotation;
  const KvCache& kv;
  const int first_head, heads;
  const KV *k[kDecodeKeys], *v[kDecodeKeys];            // rows of head 0, of this block
  const KV *next_k[kDecodeKeys], *next_v[kDecodeKeys];  // and of the next, the last one repeated where it is short

  DecodeTile(const Params& params, const WorkItem& item, int first, int number, const Rotary* by,
             DecodeScratch<Types>& memory)
      : Base(params, item, first),
        scratch(memory),
        rotation(by),
        kv(this->common.kv),
        first_head(first),
        heads(number) {}

  void run() {
    const KeyRange keys = this->visible();
    for (int i = 0; i < heads; ++i) {
      this->move_to(first_head + i);
      this->load_queries(scratch.q + i * scratch.rows * kQ, rotation);
    }
    std::memset(scratch.sums, 0, sizeof(float) * heads * scratch.rows * kSums);
    scratch.state.reset(heads * scratch.rows);
    if (!keys.empty()) locate(keys.begin, keys.end);
    for (int32_t block = keys.begin; block < keys.end; block += kDecodeKeys) {
      std::copy(next_k, next_k + kDecodeKeys, k);
      std::copy(next_v, next_v + kDecodeKeys, v);
      const bool more = block + kDecodeKeys < keys.end;
      if (more) locate(block + kDecodeKeys, keys.end);
      for (int i = 0; i < heads; ++i) head_block(i, block, more ? kDecodeKeys : keys.end - block, more);
    }
    for (int i = 0; i < heads; ++i) {
      this->move_to(first_head + i);
      for (int row = i * scratch.rows, end = row + this->rows; row < end; ++row)
        this->finish(row - i * scratch.rows, scratch.sums + row * kSums, scratch.state.highest[row],
                     scratch.state.total[row]);
    }
  }

 private:
  void locate(int32_t begin, int32_t end) {
    const int count = end - begin < kDecodeKeys ? end - begin : kDecodeKeys;
    locate_rows(kv, true, 0, this->first, begin, count, next_k);
    locate_rows(kv, false, 0, this->first, begin, count, next_v);
    std::fill(next_k + count, next_k + kDecodeKeys, next_k[count - 1]);
    std::fill(next_v + count, next_v + kDecodeKeys, next_v[count - 1]);
  }

  // Which rows of the next block to ask for beside this one's rows of head number i: all heads of a token in turn.
  const KV* const* soon(const KV* const* next, int64_t head_stride, int i, const KV** rows) const {
    for (int t = 0, token = i * kDecodeKeys / heads, head = i * kDecodeKeys % heads; t < kDecodeKeys; ++t) {
      rows[t] = next[token] + (first_head + head) * head_stride;
      if (++head == heads) head = 0, ++token;
    }
    return rows;
  }

  // Head number i meets a block of keys.
  void head_block(int i, int32_t block, int count, bool more) {
    this->move_to(first_head + i);
    const int whole = round_up(count, kLanes), at = i * scratch.rows;
    const int64_t k_offset = this->kv_head * kv.k_head, v_offset = this->kv_head * kv.v_head;
    const KV* rows[kDecodeKeys];
    const KV* const* soon_k = more ? soon(next_k, kv.k_head, i, rows) : nullptr;
    const float* prepared[kDecodeKeys];
    if constexpr (Base::kPreparesKeys) {
      this->prepare_keys(k, k_offset, block, whole, scratch.keys, rotation);
      for (int t = 0; t < whole; ++t) prepared[t] = scratch.keys + t * kQ;
    }
    for_rows(this->rows, [&](int row, auto number) {
      const float* q = scratch.q + (at + row) * kQ;
      float* logits = scratch.logits + row * kDecodeKeys;
      if constexpr (Base::kPreparesKeys) {
        dot_products<number, kDQ, kQ, kDQ>(q, prepared, 0, count, logits, row == 0 ? soon_k : nullptr);
      } else {
        dot_products<number, kDQ, kQ, kDQ>(q, k, k_offset, count, logits, row == 0 ? soon_k : nullptr);
      }
    });
    for (int row = 0; row < this->rows; ++row)
      this->weigh(row, scratch.logits + row * kDecodeKeys, block, count, 0, whole, scratch.state.at(at + row));
    const KV* const* soon_v = more ? soon(next_v, kv.v_head, i, rows) : nullptr;
    for_rows(this->rows, [&](int row, auto number) {
      add_rows<number, kDV, kSums>(scratch.logits + row * kDecodeKeys, v, v_offset, count,
                                   scratch.state.factor + at + row, scratch.sums + (at + row) * kSums,
                                   row == 0 ? soon_v : nullptr);
    });
  }
};

// All items, then all merges. Which thread does what does not matter to the result.
template <typename Variant, typename Types, typename Params>
void decode(const Params& params) {
  const AttentionParams& common = params;
  check_pages(common);
  const auto rotation = rotation_of<Types>(params);
  // As many heads to a task as leave every thread a few tasks.
  const int64_t items = common.num_items(), heads = common.num_kv_heads, enough = items * heads / (4 * num_threads());
  const int64_t most = heads_of_task(Types::HEAD_DIM_QK * sizeof(typename Types::DTypeKV));
  const int64_t each = std::max<int64_t>(1, std::min({most, enough, heads})), pieces = (heads + each - 1) / each;
  parallel_tasks(items * pieces, [&](const auto& next) {
    DecodeScratch<Types> scratch(common.tile_rows, static_cast<int>(each));
    for (int64_t task; (task = next()) < items * pieces;) {
      const WorkItem item = common.item(static_cast<int32_t>(task / pieces));
      const int64_t first = task % pieces * each, number = std::min(each, heads - first);
      DecodeTile<Variant, Types, Params>(params, item, static_cast<int>(first), static_cast<int>(number),
                                         rotation.get(), scratch)
          .run();
    }
  });
  merge_all<Variant, Types>(params);
}

}  // namespace flashinfer::cpu
