// All-to-all of experts between threads that act as ranks: dispatch and combine of random sizes without a
// pause between them.
#include <flashinfer/cpu/moe_alltoall.h>

#include <memory>
#include <thread>

#include "harness.h"

using namespace driver;

namespace {

constexpr int kMaxTokens = 9, kTopK = 3, kMaxHidden = 70, kExpertsOfRank = 2;
constexpr int32_t kInvalid = -5;

// One dispatch and its combine, on all ranks.
template <typename T>
struct Round {
  int64_t most, hidden;
  std::vector<std::vector<int32_t>> ids;       // [rank][tokens, top_k]
  std::vector<std::vector<T>> rows, results;   // [rank][tokens, hidden], [rank][ranks, most, hidden]
  std::vector<std::vector<T>> received, sums;  // [rank][ranks, most, hidden], [rank][tokens, hidden]
  std::vector<std::vector<int32_t>> found;     // ids of the received rows
  std::vector<std::vector<int32_t>> targets;   // [rank][tokens, top_k]

  int64_t tokens(int rank) const { return static_cast<int64_t>(ids[rank].size()) / kTopK; }

  // Return the ranks of a token's experts, in the order of their first names.
  std::vector<int> ranks_of(int rank, int64_t token) const {
    std::vector<int> named;
    for (int k = 0; k < kTopK; ++k) {
      const int32_t id = ids[rank][token * kTopK + k];
      const int target = id / kExpertsOfRank;
      if (id < 0 || target >= static_cast<int>(ids.size())) continue;
      if (std::find(named.begin(), named.end(), target) == named.end()) named.push_back(target);
    }
    return named;
  }
};

struct Rank {
  std::unique_ptr<uint32_t[]> inbox;
  CommState state{};
  CommReport report{};
};

template <typename T>
void run_round(Round<T>& round, const CommGroup& group) {
  const int rank = group.rank;
  const int64_t row_bytes = round.hidden * static_cast<int64_t>(sizeof(T)), places = group.ranks * round.most;
  MoeDispatchParams p{};
  p.call.group = group, p.call.rows = round.most;
  p.call.row_bytes = static_cast<uint32_t>(row_bytes + kTopK * 4);
  p.call.kind = kind_of(DType::kUInt8, Collective::kMoeDispatch);
  p.experts = round.ids[rank].data(), p.targets = round.targets[rank].data(), p.tokens = round.tokens(rank);
  p.top_k = kTopK, p.num_experts = kExpertsOfRank * group.ranks, p.count = 2, p.ids = 1, p.invalid_id = kInvalid;
  const int64_t first = whole_areas(places * 4), second = first + whole_areas(places * row_bytes);
  p.payloads[0] = {round.rows[rank].data(), row_bytes, first};
  p.payloads[1] = {round.ids[rank].data(), kTopK * 4, second};
  cpu::moe_dispatch(p);
  const uint8_t* region = region_of(group, rank);
  std::memcpy(round.received[rank].data(), region + first, places * row_bytes);
  std::memcpy(round.found[rank].data(), region + second, places * kTopK * 4);
  MoeCombineParams c{};
  c.call.group = group, c.call.rows = round.most, c.call.hidden = round.hidden, c.call.dtype = kType<T>;
  c.call.row_bytes = static_cast<uint32_t>(row_bytes), c.call.kind = kind_of(kType<T>, Collective::kMoeCombine);
  c.call.input = round.results[rank].data(), c.call.out = round.sums[rank].data();
  c.targets = round.targets[rank].data(), c.tokens = round.tokens(rank), c.top_k = kTopK;
  c.offset = group.slot_bytes - whole_areas(places * row_bytes);
  cpu::moe_combine<T>(c);
}

template <typename T>
void check_round(const Round<T>& round, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    for (int sender = 0; sender < ranks; ++sender) {
      for (int64_t token = 0; token < round.most; ++token) {
        const int64_t row = sender * round.most + token;
        const auto named = token < round.tokens(sender) ? round.ranks_of(sender, token) : std::vector<int>();
        const bool is_here = std::find(named.begin(), named.end(), rank) != named.end();
        for (int k = 0; k < kTopK; ++k) {
          const int32_t want = is_here ? round.ids[sender][token * kTopK + k] : kInvalid;
          check("id", row, round.found[rank][row * kTopK + k], want, 0);
        }
        for (int64_t j = 0; is_here && j < round.hidden; ++j)
          check("row", row, value(round.received[rank][row * round.hidden + j]),
                value(round.rows[sender][token * round.hidden + j]), 0);
      }
    }
    for (int64_t token = 0; token < round.tokens(rank); ++token) {
      for (int64_t j = 0; j < round.hidden; ++j) {
        float sum = 0;
        for (const int target : round.ranks_of(rank, token))
          sum += to_float(round.results[target][(rank * round.most + token) * round.hidden + j]);
        const int64_t at = token * round.hidden + j;
        check("sum", at, value(round.sums[rank][at]), value(cpu::from_float<T>(sum)), 0);
      }
    }
  }
}

template <typename T>
void check_group(int ranks, int count) {
  const int64_t area = whole_areas(ranks * kMaxTokens * kMaxHidden * static_cast<int64_t>(sizeof(T)));
  const int64_t region = whole_areas(ranks * kMaxTokens * 4) + 2 * area + whole_areas(ranks * kMaxTokens * kTopK * 4);
  std::vector<Rank> memory(ranks);
  for (Rank& one : memory) {
    one.inbox.reset(new uint32_t[(kHeaderBytes + region) / 4]);
    std::memset(one.inbox.get(), 0xff, kHeaderBytes + region);
  }
  std::vector<Round<T>> rounds(count);
  for (Round<T>& round : rounds) {
    round.most = drawn_int(1, kMaxTokens), round.hidden = drawn_int(1, kMaxHidden);
    const int64_t places = ranks * round.most;
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t tokens = drawn_int(0, static_cast<int>(round.most));
      std::vector<int32_t> ids(tokens * kTopK);
      for (int32_t& id : ids) id = static_cast<int32_t>(drawn_int(-1, kExpertsOfRank * ranks));
      round.ids.push_back(ids), round.targets.push_back(std::vector<int32_t>(tokens * kTopK, -9));
      round.rows.push_back(drawn<T>(tokens * round.hidden)), round.results.push_back(drawn<T>(places * round.hidden));
      round.received.push_back(unwritten<T>(places * round.hidden));
      round.sums.push_back(unwritten<T>(tokens * round.hidden));
      round.found.push_back(std::vector<int32_t>(places * kTopK));
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    CommGroup group{};
    group.state = &memory[rank].state, group.report = &memory[rank].report;
    group.rank = rank, group.ranks = ranks, group.slot_bytes = region, group.timeout_ns = 2'000'000'000;
    for (int peer = 0; peer < ranks; ++peer) group.inbox[peer] = reinterpret_cast<uint8_t*>(memory[peer].inbox.get());
    threads.emplace_back([&rounds, group] {
      for (Round<T>& round : rounds) run_round(round, group);
    });
  }
  for (std::thread& one : threads) one.join();
  for (int rank = 0; rank < ranks; ++rank) {
    check("error", rank, memory[rank].report.error, 0, 0);
    check("epoch", rank, memory[rank].state.epoch[0], 2 * count, 0);
  }
  for (const Round<T>& round : rounds) check_round(round, ranks);
}

}  // namespace

void run() {
  for (int ranks = 1; ranks <= 4 && failures == 0; ++ranks) {
    check_group<float>(ranks, 60);
    check_group<bfloat16_t>(ranks, 30);
    check_group<half_t>(ranks, 15);
  }
}
