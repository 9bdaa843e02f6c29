// Writes to a paged cache, and functions of its index tensors.
#include <flashinfer/cpu/page.h>

#include "harness.h"

using namespace driver;

constexpr int kPageSize = 3, kHeads = 2, kDim = 5;

void run() {
  for (int round = 0; round < 20; ++round) {
    const std::vector<int32_t> seq_lens = {drawn_int(4, 9), drawn_int(4, 9), drawn_int(4, 9)};
    const std::vector<int32_t> append_indptr = {0, 2, 2, 6};
    std::vector<int32_t> kv_indptr = {0}, indices;
    for (const int32_t length : seq_lens) {
      const int32_t pages = (length + kPageSize - 1) / kPageSize;
      kv_indptr.push_back(kv_indptr.back() + pages);
    }
    for (int32_t page = 0; page < kv_indptr.back() + 2; ++page) indices.push_back(page);
    std::shuffle(indices.begin(), indices.end(), engine);
    std::vector<int32_t> requests(6, -1), positions(6, -1);
    cpu::batch_indices_positions(
        {append_indptr.data(), seq_lens.data(), requests.data(), positions.data(), 6, 3, false});

    const auto tokens = drawn<half_t>(6 * kHeads * kDim);
    auto cache = unwritten<half_t>(static_cast<int64_t>(indices.size()) * kPageSize * kHeads * kDim);
    AppendParams p{};
    constexpr int64_t kRow = kDim * sizeof(half_t), kToken = kHeads * kRow;
    p.streams[0] = {reinterpret_cast<const char*>(tokens.data()),
                    reinterpret_cast<char*>(cache.data()),
                    kToken,
                    kRow,
                    kPageSize * kToken,
                    kToken,
                    kRow,
                    kHeads,
                    kRow};
    p.streams[1] = p.streams[0], p.streams[1].num_heads = 0;
    p.batch_indices = requests.data(), p.positions = positions.data();
    p.kv_indices = indices.data(), p.kv_indptr = kv_indptr.data();
    p.num_tokens = 6, p.num_indices = kv_indptr.back(), p.num_pages = static_cast<int64_t>(indices.size());
    p.batch_size = 3, p.page_size = kPageSize, p.op = "page";
    cpu::append_paged(p);
    std::vector<bool> written(cache.size());
    for (int token = 0; token < 6; ++token) {
      const int request = token < 2 ? 0 : 2, position = seq_lens[request] - (append_indptr[request + 1] - token);
      check("request", token, requests[token], request, 0);
      check("position", token, positions[token], position, 0);
      const int page = indices[kv_indptr[request] + position / kPageSize];
      for (int i = 0; i < kHeads * kDim; ++i) {
        const int64_t at = (int64_t{page} * kPageSize + position % kPageSize) * kHeads * kDim + i;
        check("cache", at, value(cache[at]), value(tokens[token * kHeads * kDim + i]), 0);
        written[at] = true;
      }
    }
    for (size_t at = 0; at < cache.size(); ++at)
      if (!written[at]) check("not appended", static_cast<int64_t>(at), value(cache[at]), NAN, 0);
  }
}
