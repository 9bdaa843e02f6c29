// Decode on the CPU: attention of few queries, bound by memory bandwidth. Every key and value is read once,
// in the cache, for all query heads of its group. Keys are split among workers as in Flash-Decoding (Dao et
// al., 2023): partial states (m, l, O) are merged at the end.
#pragma once

#include <algorithm>

#include <flashinfer/attention/config.h>
#include <flashinfer/cpu/attention/decode_products.h>
#include <flashinfer/cpu/attention/merge.h>
#include <flashinfer/cpu/attention/tile.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/profiler.h>

namespace flashinfer::cpu {

// Return the number of heads per task. The heads of a token are adjacent in most caches, and memory is
// faster in long reads. Two blocks of their keys and values fit into the second-level cache.
inline int32_t heads_of_task(int64_t row_bytes) {
  return row_bytes > 2048 ? 1 : static_cast<int32_t>(2048 / row_bytes);
}

inline WorkLimits decode_limits(const AttentionConfig& config, int64_t rows, int32_t tile_rows) {
  if (tile_rows == 0) tile_rows = rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
  const int32_t heads = heads_of_task(config.head_dim_qk * size_of(config.kv));
  return {tile_rows, 4 * num_threads() * heads, 4 * kDecodeKeys, kDecodeKeys};
}

// Memory of a worker: queries, O and softmax state of all rows of all heads of a task, and one head's logits.
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

// A work item for heads [first_head, first_head + heads).
template <typename Variant, typename Types, typename Params>
struct DecodeTile : Tile<Variant, Types, Params> {
  using Base = Tile<Variant, Types, Params>;
  using KV = typename Types::DTypeKV;
  using Rotary = Rotation<Types::HEAD_DIM_QK>;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;
  static constexpr int kQ = Types::kQueryStride, kSums = Types::kSumStride;

  DecodeScratch<Types>& scratch;
  Profiler<Params::kProfiler>& profiler;
  const Rotary* rotation;
  const KvCache& kv;
  const int first_head, heads;
  const KV *k[kDecodeKeys], *v[kDecodeKeys];            // rows of head 0, of this block
  const KV *next_k[kDecodeKeys], *next_v[kDecodeKeys];  // and of the next; a short block repeats its last row

  DecodeTile(const Params& params, const WorkItem& item, int first, int number, const Rotary* by,
             DecodeScratch<Types>& memory, Profiler<Params::kProfiler>& track)
      : Base(params, item, first),
        scratch(memory),
        profiler(track),
        rotation(by),
        kv(this->common.kv),
        first_head(first),
        heads(number) {}

  void run() {
    const Range keys = this->visible();
    profiler.begin(Event::kLoadQuery);
    for (int i = 0; i < heads; ++i) {
      this->move_to(first_head + i);
      this->load_queries(scratch.q + i * scratch.rows * kQ, rotation);
    }
    std::memset(scratch.sums, 0, sizeof(float) * heads * scratch.rows * kSums);
    scratch.state.reset(heads * scratch.rows);
    profiler.end(Event::kLoadQuery);
    if (!keys.empty()) locate(keys.begin, keys.end);
    for (int32_t block = keys.begin; block < keys.end; block += kDecodeKeys) {
      std::copy(next_k, next_k + kDecodeKeys, k);
      std::copy(next_v, next_v + kDecodeKeys, v);
      const bool more = block + kDecodeKeys < keys.end;
      if (more) locate(block + kDecodeKeys, keys.end);
      for (int i = 0; i < heads; ++i) head_block(i, block, more ? kDecodeKeys : keys.end - block, more);
    }
    profiler.begin(Event::kWriteOutput);
    for (int i = 0; i < heads; ++i) {
      this->move_to(first_head + i);
      for (int row = i * scratch.rows, end = row + this->rows; row < end; ++row)
        this->finish(row - i * scratch.rows, scratch.sums + row * kSums, scratch.state.m[row], scratch.state.l[row]);
    }
    profiler.end(Event::kWriteOutput);
  }

 private:
  void locate(int32_t begin, int32_t end) {
    const int count = end - begin < kDecodeKeys ? end - begin : kDecodeKeys;
    locate_rows(kv, true, 0, this->first, begin, count, next_k);
    locate_rows(kv, false, 0, this->first, begin, count, next_v);
    std::fill(next_k + count, next_k + kDecodeKeys, next_k[count - 1]);
    std::fill(next_v + count, next_v + kDecodeKeys, next_v[count - 1]);
  }

  // Select the rows of the next block to prefetch while head number i is computed: all heads of a token in
  // order.
  const KV* const* ahead(const KV* const* next, int64_t head_stride, int i, const KV** rows) const {
    for (int t = 0, token = i * kDecodeKeys / heads, head = i * kDecodeKeys % heads; t < kDecodeKeys; ++t) {
      rows[t] = next[token] + (first_head + head) * head_stride;
      if (++head == heads) head = 0, ++token;
    }
    return rows;
  }

  // Compute head number i with a block of keys.
  void head_block(int i, int32_t block, int count, bool more) {
    this->move_to(first_head + i);
    const int whole = round_up(count, kDotSums), at = i * scratch.rows;
    const int64_t k_offset = this->kv_head * kv.k_head, v_offset = this->kv_head * kv.v_head;
    const KV* rows[kDecodeKeys];
    const KV* const* ahead_k = more ? ahead(next_k, kv.k_head, i, rows) : nullptr;
    const float* prepared[kDecodeKeys];
    profiler.begin(Event::kGemmQk);
    if constexpr (Base::kPreparesKeys) {
      this->prepare_keys(k, k_offset, block, whole, scratch.keys, rotation);
      for (int t = 0; t < whole; ++t) prepared[t] = scratch.keys + t * kQ;
    }
    for_rows(this->rows, [&](int row, auto number) {
      const float* q = scratch.q + (at + row) * kQ;
      float* logits = scratch.logits + row * kDecodeKeys;
      if constexpr (Base::kPreparesKeys) {
        dot_products<number, kDQ, kQ, kDQ>(q, prepared, 0, count, logits, row == 0 ? ahead_k : nullptr);
      } else {
        dot_products<number, kDQ, kQ, kDQ>(q, k, k_offset, count, logits, row == 0 ? ahead_k : nullptr);
      }
    });
    profiler.end(Event::kGemmQk);
    profiler.begin(Event::kSoftmax);
    for (int row = 0; row < this->rows; ++row)
      this->logits_to_weights(row, scratch.logits + row * kDecodeKeys, block, count, 0, whole,
                              scratch.state.at(at + row));
    profiler.end(Event::kSoftmax);
    profiler.begin(Event::kGemmPv);
    const KV* const* ahead_v = more ? ahead(next_v, kv.v_head, i, rows) : nullptr;
    for_rows(this->rows, [&](int row, auto number) {
      add_rows<number, kDV, kSums>(scratch.logits + row * kDecodeKeys, v, v_offset, count,
                                   scratch.state.rescale + at + row, scratch.sums + (at + row) * kSums,
                                   row == 0 ? ahead_v : nullptr);
    });
    profiler.end(Event::kGemmPv);
  }
};

// Compute all items, then all merges. The result does not depend on the assignment to threads.
template <typename Variant, typename Types, typename Params>
void decode(const Params& given) {
  const Params params = with_tracks(given);
  const AttentionParams& common = params;
  check_pages(common);
  const auto rotation = rotation_of<Types>(params);
  // Heads per task, so that every thread has at least four tasks.
  const int64_t items = common.num_items(), heads = common.num_kv_heads, enough = items * heads / (4 * num_threads());
  const int64_t most = heads_of_task(Types::HEAD_DIM_QK * sizeof(typename Types::DTypeKV));
  const int64_t each = std::max<int64_t>(1, std::min({most, enough, heads})), pieces = (heads + each - 1) / each;
  parallel_workers(items * pieces, [&](const auto& next, int64_t worker) {
    Profiler<Params::kProfiler> profiler(params, worker);
    DecodeScratch<Types> scratch(common.tile_rows, static_cast<int>(each));
    for (int64_t task; (task = next()) < items * pieces;) {
      const WorkItem item = common.item(static_cast<int32_t>(task / pieces));
      const int64_t first = task % pieces * each, number = std::min(each, heads - first);
      profiler.begin(Event::kItem);
      DecodeTile<Variant, Types, Params>(params, item, static_cast<int>(first), static_cast<int>(number),
                                         rotation.get(), scratch, profiler)
          .run();
      profiler.end(Event::kItem);
    }
    profiler.finish();
  });
  merge_all<Variant, Types>(params);
}

}  // namespace flashinfer::cpu
