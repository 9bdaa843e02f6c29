// Schedules from tensors of lengths: the items of a tile cover its keys once, and their slots are merged in
// order.
#include <flashinfer/cpu/attention/batch_schedule.h>

#include "harness.h"

using namespace driver;

struct Lists {
  std::vector<int32_t> counts = std::vector<int32_t>(2, -7), qo_lens, kv_lens, kv_indptr;
  std::vector<MergeItem> merges;
  std::vector<WorkItem> items;
  std::vector<uint32_t> tickets;
};

// Make a schedule of drawn lengths. Some lie outside of their bounds, which counts as the nearer bound.
void scheduled(int32_t batch, int32_t q_len, int32_t workers, int32_t longest, bool causal, int32_t window) {
  constexpr int32_t kGroup = 3, kTileRows = 4, kKvHeads = 2, kTableStride = 77, kMaxKeys = 20000;
  std::vector<int32_t> lens(batch);
  for (int32_t& one : lens) one = drawn_int(-2, longest);
  Lists lists;
  const int64_t tiles = batch_schedule::max_tiles(batch, q_len, kGroup, kTileRows);
  lists.qo_lens.assign(batch + 1, -7), lists.kv_lens.assign(batch + 1, -7), lists.kv_indptr.assign(batch + 2, -7);
  lists.items.assign(batch_schedule::max_items(tiles, workers) + 1, WorkItem{});
  lists.merges.assign(batch_schedule::max_merges(tiles, workers) + 1, MergeItem{});
  lists.tickets.assign(lists.merges.size() * kKvHeads + 1, 7);
  lists.items.back().batch = lists.merges.back().batch = -7;
  BatchScheduleParams p{};
  p.seq_lens = lens.data(), p.batch_size = batch, p.num_tokens = batch * q_len, p.q_len = q_len;
  p.most_keys = kMaxKeys, p.table_stride = kTableStride, p.num_kv_heads = kKvHeads, p.group = FastDiv(kGroup);
  p.tile_rows = kTileRows, p.mask_mode = causal ? MaskMode::kCausal : MaskMode::kNone, p.window_left = window;
  p.workers = FastDiv(workers), p.counts = lists.counts.data(), p.qo_lens = lists.qo_lens.data();
  p.kv_lens = lists.kv_lens.data(), p.kv_indptr = lists.kv_indptr.data(), p.merges = lists.merges.data();
  p.items = lists.items.data(), p.tickets = lists.tickets.data();
  cpu::schedule_batch(p);

  const int32_t num_items = lists.counts[0], num_merges = lists.counts[1];
  check("behind the items", batch, lists.items.back().batch, -7, 0);
  check("behind the merges", batch, lists.merges.back().batch, -7, 0);
  check("behind the tickets", batch, lists.tickets.back(), 7, 0);
  int32_t slots = 0, found_items = 0, found_merges = 0;
  for (int32_t b = 0; b < batch; ++b) {
    const int32_t kv_len = std::clamp(lens[b], 0, kMaxKeys);
    check("kv_len", b, lists.kv_lens[b], kv_len, 0), check("qo_len", b, lists.qo_lens[b], q_len, 0);
    check("kv_indptr", b, lists.kv_indptr[b], b * kTableStride, 0);
    for (int32_t row = 0; row < q_len * kGroup; row += kTileRows) {
      const int32_t first = row / kGroup, last = (std::min(row + kTileRows, q_len * kGroup) - 1) / kGroup;
      const int32_t begin = window < 0 ? 0 : std::clamp(kv_len - q_len + first - window, 0, kv_len);
      const int32_t end = causal ? std::clamp(kv_len - q_len + last + 1, 0, kv_len) : kv_len;
      std::vector<WorkItem> pieces;
      for (int32_t i = 0; i < num_items; ++i)
        if (lists.items[i].batch == b && lists.items[i].row_start == row) pieces.push_back(lists.items[i]);
      std::sort(pieces.begin(), pieces.end(),
                [](const WorkItem& x, const WorkItem& y) { return x.kv_start < y.kv_start; });
      found_items += static_cast<int32_t>(pieces.size());
      check("items of a tile", b, pieces.empty(), false, 0);
      if (pieces.empty()) continue;
      check("first key", b, pieces.front().kv_start, begin, 0);
      check("last key", b, pieces.back().kv_end, std::max(begin, end), 0);
      for (size_t i = 1; i < pieces.size(); ++i) check("next key", b, pieces[i].kv_start, pieces[i - 1].kv_end, 0);
      for (const WorkItem& one : pieces) {
        check("qo_start", b, one.qo_start, b * q_len, 0), check("kv_len of an item", b, one.kv_len, kv_len, 0);
        if (pieces.size() == 1) check("slot of a whole tile", b, one.slot, -1, 0);
      }
      if (pieces.size() == 1) continue;
      const MergeItem& merge = lists.merges[std::min(found_merges, num_merges)];
      check("batch of a merge", b, merge.batch, b, 0), check("row of a merge", b, merge.row_start, row, 0);
      for (const WorkItem& one : pieces) check("slot", b, one.slot, slots++, 0);
      ++found_merges;
    }
  }
  check("items", batch, num_items, found_items, 0), check("merges", batch, num_merges, found_merges, 0);
  check("slots", batch, slots <= batch_schedule::max_slots(workers), true, 0);
}

void run() {
  for (int turn = 0; turn < 20; ++turn)
    for (const int32_t batch : {1, 3, 40}) {
      const int32_t workers = drawn_int(1, 132), longest = drawn_int(0, 3) ? 25000 : 600;
      scheduled(batch, 1, workers, longest, false, -1), scheduled(batch, drawn_int(2, 5), workers, longest, true, -1);
      scheduled(batch, drawn_int(1, 3), workers, longest, true, drawn_int(0, 3000));
    }
}
