// Prefill on the CPU (FlashAttention-2, arXiv 2307.08691). For a tile of queries and each block of keys:
//   S = Q K^T;  m' = max(m, rowmax S);  P = 2^(S - m');  l = l 2^(m - m') + rowsum P;  O = O 2^(m - m') + P V
// A block is packed once per tile, so both products are bound by arithmetic.
#pragma once

#include <flashinfer/attention/config.h>
#include <flashinfer/cpu/attention/merge.h>
#include <flashinfer/cpu/attention/tile.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/profiler.h>
#include <flashinfer/cpu/simd/gemm_bf16.h>

namespace flashinfer::cpu {

constexpr int kPrefillKeys = 128;  // of a block

inline WorkLimits prefill_limits(int64_t rows, int32_t tile_rows) {
  if (tile_rows == 0) tile_rows = rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 512 ? 64 : rows < 2048 ? 128 : 256;
  return {tile_rows, 4 * num_threads(), 4 * kPrefillKeys, kPrefillKeys};
}

// Scratch memory of a worker: Q, S and O of a tile, K and V of a block.
template <typename Types>
struct PrefillScratch {
  static constexpr int kDQ = Types::HEAD_DIM_QK, kQ = Types::kQueryStride, kSums = Types::kSumStride;
  static constexpr int kKeyPanel = kDQ * kPanel, kValuePanel = kPrefillKeys * kPanel;
  static constexpr int kValuePanels = (kSums + kPanel - 1) / kPanel;

  Scratch memory;
  float *q, *logits, *sums, *k, *v, *prepared;
  SoftmaxState state;

  explicit PrefillScratch(int tile_rows) : PrefillScratch(int64_t{round_up(tile_rows, kGemmRows)}, 0) {}

 private:
  PrefillScratch(int64_t rows, int)
      : memory(rows * (kQ + kPrefillKeys + kSums + 3) + kPrefillKeys / kPanel * kKeyPanel + kValuePanels * kValuePanel +
               kLanes * kQ),
        q(memory.take(rows * kQ)),
        logits(memory.take(rows * kPrefillKeys)),
        sums(memory.take(rows * kSums)),
        k(memory.take(kPrefillKeys / kPanel * kKeyPanel)),
        v(memory.take(kValuePanels * kValuePanel)),
        prepared(memory.take(kLanes * kQ)),
        state(memory, static_cast<int>(rows)) {}
};

// Computation of a tile from packed blocks of keys and values.
template <typename Variant, typename Types, typename Params>
struct PrefillBlocks : Tile<Variant, Types, Params> {
  using Base = Tile<Variant, Types, Params>;
  using KV = typename Types::DTypeKV;
  using Memory = PrefillScratch<Types>;
  static constexpr int kDQ = Types::HEAD_DIM_QK, kDV = Types::HEAD_DIM_VO;
  static constexpr int kQ = Memory::kQ, kSums = Memory::kSums;

  // Products of bfloat16 pairs: for bfloat16, and for float8 as bfloat16. P is rounded to bfloat16, so
  // softmax must limit it to [0, 1].
  static constexpr bool kPairs = kHasPairs && Variant::use_softmax && !Types::kRope && !Variant::transforms_key &&
                                 !Variant::transforms_query && std::is_same_v<typename Types::DTypeQ, bfloat16_t> &&
                                 (std::is_same_v<KV, bfloat16_t> || sizeof(KV) == 1);

  Memory& scratch;
  Profiler<Params::kProfiler>& profiler;
  int32_t block = 0;  // first key of the block
  int count = 0;      // number of its keys

  PrefillBlocks(const Params& params, const WorkItem& item, int32_t kv_head, Memory& memory,
                Profiler<Params::kProfiler>& track)
      : Base(params, item, kv_head), scratch(memory), profiler(track) {
    const int padded = round_up(this->rows, 4);
    if constexpr (kPairs) {
      std::memset(pairs(scratch.q) + this->rows * kQ, 0, sizeof(bfloat16_t) * (padded - this->rows) * kQ);
    } else {
      std::memset(scratch.q + this->rows * kQ, 0, sizeof(float) * (padded - this->rows) * kQ);
    }
    std::memset(scratch.sums, 0, sizeof(float) * padded * kSums);
    scratch.state.reset(padded);
  }

  // pack() packs keys and values of the block.
  template <typename Pack>
  void run(const Pack& pack) {
    const Range keys = this->visible();
    for (block = keys.begin; block < keys.end; block += kPrefillKeys) {
      count = keys.end - block < kPrefillKeys ? keys.end - block : kPrefillKeys;
      profiler.begin(Event::kPackKv);
      pack();
      profiler.end(Event::kPackKv);
      profiler.begin(Event::kGemmQk);
      multiply_keys();
      profiler.end(Event::kGemmQk);
      profiler.begin(Event::kSoftmax);
      for (int row = 0; row < this->rows; ++row) {
        const Range range = in_vectors(seen_by_group(row));
        if (range.empty()) continue;
        float* logits = scratch.logits + row * kPrefillKeys;
        this->logits_to_weights(row, logits, block, count, range.begin, range.end, scratch.state.at(row));
        if constexpr (kPairs)  // in place: the result is half as long, and each element is read before it is
                               // overwritten
          for (int t = range.begin; t < range.end; t += kLanes) store_rounded(pairs(logits) + t, load(logits + t));
      }
      profiler.end(Event::kSoftmax);
      profiler.begin(Event::kGemmPv);
      multiply_values();
      profiler.end(Event::kGemmPv);
    }
    profiler.begin(Event::kWriteOutput);
    for (int row = 0; row < this->rows; ++row)
      this->finish(row, scratch.sums + row * kSums, scratch.state.m[row], scratch.state.l[row]);
    profiler.end(Event::kWriteOutput);
  }

  // Reinterprets memory of floats as memory of bfloat16.
  static bfloat16_t* pairs(float* floats) { return reinterpret_cast<bfloat16_t*>(floats); }

 private:
  static const float* ones() {
    static constexpr float kOnes[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    static_assert(kGemmRows <= 8);
    return kOnes;
  }

  // Return the range of the block that a group of rows sees. A product computes a group together.
  Range seen_by_group(int row) const {
    const int first = row / kGemmRows * kGemmRows, last = first + kGemmRows - 1;
    return this->visible(first, last < this->rows ? last : this->rows - 1, block, count);
  }
  static Range in_vectors(Range range) { return {range.begin / kLanes * kLanes, round_up(range.end, kLanes)}; }

  // Call body(row, constant of kGemmRows or 4, range) for the groups that see any key.
  template <typename Body>
  void for_groups(const Body& body) const {
    for (int row = 0; row < this->rows; row += kGemmRows) {
      const Range seen = seen_by_group(row);
      if (seen.empty()) continue;
      if (kGemmRows == 4 || this->rows - row > 4) {
        body(row, std::integral_constant<int, kGemmRows>{}, seen);
      } else {
        body(row, std::integral_constant<int, 4>{}, seen);
      }
    }
  }

  void multiply_keys() {
    // Queries are not scaled in advance: they are not rounded afterwards.
    [[maybe_unused]] float scale = 1;
    if constexpr (kPairs && !Variant::transforms_logits) scale = this->variant.sm_scale_log2;
    for (int t = 0; t < count; t += kPanel) {
      for_groups([&](int row, auto number, Range seen) {
        if (t + kPanel <= seen.begin || t >= seen.end) return;
        float* logits = scratch.logits + row * kPrefillKeys + t;
        const int64_t panel = t / kPanel * Memory::kKeyPanel;
        if constexpr (kPairs) {
          multiply_pairs<number, kPanelVectors, kQ, kPrefillKeys, Sums::kSet>(kDQ, pairs(scratch.q) + row * kQ,
                                                                              pairs(scratch.k) + panel, logits, &scale);
        } else {
          // Long sums are split, because rounding errors grow with their length.
          constexpr int kPart = kDQ > 256 ? 96 : kDQ;
          const float *q = scratch.q + row * kQ, *k = scratch.k + panel;
          multiply_panel<number, kPanelVectors, kQ, kPrefillKeys, Sums::kSet>(kPart, q, k, logits, nullptr);
          for (int d = kPart; d < kDQ; d += kPart)
            multiply_panel<number, kPanelVectors, kQ, kPrefillKeys, Sums::kScaleAndAdd>(
                kDQ - d < kPart ? kDQ - d : kPart, q + d, k + d * kPanel, logits, ones());
        }
      });
    }
  }

  void multiply_values() {
    constexpr int kWhole = kSums / kPanel * kPanel;
    for (int d = 0; d < kWhole; d += kPanel) multiply_values<kPanelVectors>(d);
    if constexpr (kWhole < kSums) multiply_values<1>(kWhole);
  }

  template <int kVectors>
  void multiply_values(int d) {
    for_groups([&](int row, auto number, Range seen) {
      const int from = in_vectors(seen).begin;
      float *weights = scratch.logits + row * kPrefillKeys, *rescale = scratch.state.rescale + row;
      const int64_t panel = d / kPanel * Memory::kValuePanel + from * kPanel;
      float* sums = scratch.sums + row * kSums + d;
      if constexpr (kPairs) {
        multiply_pairs<number, kVectors, 2 * kPrefillKeys, kSums, Sums::kScaleAndAdd>(
            seen.end - from, pairs(weights) + from, pairs(scratch.v) + panel, sums, rescale);
      } else {
        multiply_panel<number, kVectors, kPrefillKeys, kSums, Sums::kScaleAndAdd>(seen.end - from, weights + from,
                                                                                  scratch.v + panel, sums, rescale);
      }
    });
  }
};

template <typename Variant, typename Types, typename Params>
struct PrefillTile : PrefillBlocks<Variant, Types, Params> {
  using Blocks = PrefillBlocks<Variant, Types, Params>;
  using typename Blocks::KV;
  using typename Blocks::Memory;
  using Rotary = Rotation<Types::HEAD_DIM_QK>;
  using Blocks::kDQ, Blocks::kDV, Blocks::kQ, Blocks::kPairs;
  using Blocks::scratch, Blocks::block, Blocks::count, Blocks::pairs;

  const Rotary* rotation;

  PrefillTile(const Params& params, const WorkItem& item, int32_t kv_head, const Rotary* by, Memory& memory,
              Profiler<Params::kProfiler>& track)
      : Blocks(params, item, kv_head, memory, track), rotation(by) {
    if constexpr (kPairs) {
      this->copy_queries(pairs(scratch.q));
    } else {
      this->load_queries(scratch.q, rotation);
    }
  }

  void run() {
    Blocks::run([this] {
      pack_keys();
      pack_values();
    });
  }

 private:
  // Pack keys. Columns after the request's last key are zeros.
  void pack_keys() {
    static const KV zeros[kDQ] = {};
    const KV* rows[kPrefillKeys];
    locate_rows(this->common.kv, true, this->kv_head * this->common.kv.k_head, this->first, block, count, rows);
    const int padded = round_up(count, kPanel);
    for (int t = count; t < padded; ++t) rows[t] = zeros;
    for (int t = 0; t < padded; t += kLanes) {
      float* panel = scratch.k + t / kPanel * Memory::kKeyPanel + t % kPanel;
      if constexpr (kPairs) {
        pack_column_pairs<kDQ>(rows + t, pairs(scratch.k) + t / kPanel * Memory::kKeyPanel + 2 * (t % kPanel));
      } else if constexpr (Blocks::kPreparesKeys) {
        this->prepare_keys(rows + t, 0, block + t, kLanes, scratch.prepared, rotation);
        const float* prepared[kLanes];
        for (int i = 0; i < kLanes; ++i) prepared[i] = scratch.prepared + i * kQ;
        pack_columns<kDQ>(prepared, panel);
      } else {
        pack_columns<kDQ>(rows + t, panel);
      }
    }
  }

  void pack_values() {
    const KV* rows[kPrefillKeys];
    locate_rows(this->common.kv, false, this->kv_head * this->common.kv.v_head, this->first, block, count, rows);
    if constexpr (kPairs) {
      for (int t = 0; t < count; t += 2)  // the row after an odd number of keys is not read
        pack_row_pairs<kDV>(rows[t], rows[t + 1 < count ? t + 1 : t], pairs(scratch.v) + t * kPanel,
                            Memory::kValuePanel);
    } else {
      for (int t = 0; t < count; ++t) pack_row<kDV>(rows[t], scratch.v + t * kPanel, Memory::kValuePanel);
    }
  }
};

// Compute all items, then all merges. The result does not depend on the assignment to threads.
template <typename Variant, typename Types, typename Params>
void prefill(const Params& given) {
  const Params params = with_tracks(given);
  const AttentionParams& common = params;
  check_pages(common);
  const auto rotation = rotation_of<Types>(params);
  const int64_t items = common.num_items(), tasks = items * common.num_kv_heads;
  parallel_workers(tasks, [&](const auto& next, int64_t worker) {
    Profiler<Params::kProfiler> profiler(params, worker);
    PrefillScratch<Types> scratch(common.tile_rows);
    // One head after the other, so that its keys stay in the cache. Longest items first: without a plan, the
    // last tile.
    for (int64_t task; (task = next()) < tasks;) {
      const int64_t number = common.items ? task % items : items - 1 - task % items;
      const WorkItem item = common.item(static_cast<int32_t>(number));
      profiler.begin(Event::kItem);
      PrefillTile<Variant, Types, Params>(params, item, static_cast<int32_t>(task / items), rotation.get(), scratch,
                                          profiler)
          .run();
      profiler.end(Event::kItem);
    }
    profiler.finish();
  });
  merge_all<Variant, Types>(params);
}

}  // namespace flashinfer::cpu
