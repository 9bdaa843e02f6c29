// All-reduce, reduce-scatter and all-gather between threads that act as ranks: calls of random shapes without
// a pause between them.
#include <flashinfer/cpu/allreduce.h>

#include <memory>
#include <thread>

#include "harness.h"

using namespace driver;

namespace {

// Outputs of a call with the norm, by the tensors that they overwrite.
enum Alias { kApart, kInPlace, kResidualInInput };

struct Call {
  int64_t rows, hidden;
  bool with_norm, two_shots;
  Alias alias;
  bool in_shares;  // the sum as reduce-scatter and all-gather
};

template <typename T>
struct Tensors {
  std::vector<T> input, residual, sum, residual_out, norm_out;
};

// One rank's memory.
struct Rank {
  std::unique_ptr<uint32_t[]> inbox;
  CommState state{};
  CommReport report{};
};

template <typename T>
void sum_in_shares(AllReduceParams p, Tensors<T>& x) {
  T* own = x.sum.data() + p.rows / p.group.ranks * p.group.rank * p.hidden;
  p.rows /= p.group.ranks;
  p.kind = kind_of(p.dtype, Collective::kReduceScatter), p.out = own;
  cpu::reduce_scatter<T>(p);
  p.kind = kind_of(p.dtype, Collective::kAllGather), p.input = own, p.out = x.sum.data();
  cpu::all_gather<T>(p);
}

template <typename T>
void call_of(const Call& call, const CommGroup& group, Tensors<T>& x, const std::vector<T>& weight) {
  AllReduceParams p{};
  p.group = group, p.input = x.input.data(), p.rows = call.rows, p.hidden = call.hidden, p.dtype = kType<T>;
  p.row_bytes = static_cast<uint32_t>(call.hidden * sizeof(T)), p.two_shots = call.two_shots;
  p.kind = kind_of(p.dtype, call.with_norm, NormQuant::kNone, call.two_shots);
  p.eps = 1e-5, p.weight_bias = 0.5f;
  if (call.in_shares) return sum_in_shares(p, x);
  if (!call.with_norm) {
    p.out = call.alias == kInPlace ? x.input.data() : x.sum.data();
  } else {
    p.weight = weight.data(), p.residual_in = x.residual.data();
    p.residual_out = call.alias == kInPlace           ? x.residual.data()
                     : call.alias == kResidualInInput ? x.input.data()
                                                      : x.residual_out.data();
    p.norm_out = call.alias == kInPlace ? x.input.data() : x.norm_out.data();
  }
  cpu::allreduce<T>(p);
  if (!call.with_norm && call.alias == kInPlace) x.sum = x.input;
  if (call.with_norm && call.alias == kInPlace) x.residual_out = x.residual, x.norm_out = x.input;
  if (call.with_norm && call.alias == kResidualInInput) x.residual_out = x.input;
}

template <typename T>
void check_group(int ranks, int count) {
  constexpr int64_t kMaxRows = 12, kMaxHidden = 80;
  const int64_t slot_bytes = kMaxRows * padded(kMaxHidden * static_cast<int64_t>(sizeof(T)));
  const int64_t inbox_bytes = kHeaderBytes + kSlots * (ranks - 1) * slot_bytes;
  std::vector<Rank> memory(ranks);
  for (Rank& one : memory) {
    one.inbox.reset(new uint32_t[inbox_bytes / 4]);
    std::memset(one.inbox.get(), 0xff, inbox_bytes);
  }
  std::vector<Call> calls;
  int64_t epochs = count;
  std::vector<std::vector<Tensors<T>>> tensors(ranks);  // [rank][call]
  std::vector<std::vector<T>> inputs, residuals;        // [call * ranks + rank], [call]
  const auto weight = drawn<T>(kMaxHidden);
  for (int i = 0; i < count; ++i) {
    calls.push_back({drawn_int(0, kMaxRows), drawn_int(1, kMaxHidden), drawn_int(0, 1) == 1, drawn_int(0, 1) == 1,
                     static_cast<Alias>(drawn_int(0, 2)), false});
    Call& call = calls.back();
    call.in_shares = !call.with_norm && drawn_int(0, 1) == 1;
    if (call.in_shares) call.rows = call.rows / ranks * ranks, ++epochs;
    const int64_t size = calls.back().rows * calls.back().hidden;
    residuals.push_back(drawn<T>(size));
    for (int rank = 0; rank < ranks; ++rank) {
      inputs.push_back(drawn<T>(size));
      tensors[rank].push_back(
          {inputs.back(), residuals.back(), unwritten<T>(size), unwritten<T>(size), unwritten<T>(size)});
    }
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    CommGroup group{};
    group.state = &memory[rank].state, group.report = &memory[rank].report;
    group.rank = rank, group.ranks = ranks, group.slot_bytes = slot_bytes, group.timeout_ns = 2'000'000'000;
    for (int peer = 0; peer < ranks; ++peer) group.inbox[peer] = reinterpret_cast<uint8_t*>(memory[peer].inbox.get());
    threads.emplace_back([&, group, rank] {
      for (int i = 0; i < count; ++i) call_of(calls[i], group, tensors[rank][i], weight);
      if (memory[rank].report.error != 0)
        for (Rank& one : memory) __atomic_store_n(&one.report.abort, 1u, __ATOMIC_RELAXED);  // waits for this rank end
    });
  }
  for (std::thread& one : threads) one.join();

  for (int rank = 0; rank < ranks; ++rank) {
    check("error", rank, memory[rank].report.error, 0, 0);
    check("epoch", rank, memory[rank].state.epoch[0], epochs, 0);
  }
  for (int i = 0; i < count; ++i) {
    const int64_t hidden = calls[i].hidden;
    for (int64_t row = 0; row < calls[i].rows; ++row) {
      std::vector<float> sums(hidden), total(hidden);
      double squares = 0;
      for (int64_t j = 0; j < hidden; ++j) {
        const int64_t at = row * hidden + j;
        float sum = to_float(inputs[i * ranks][at]);
        for (int rank = 1; rank < ranks; ++rank) sum += to_float(inputs[i * ranks + rank][at]);
        sums[j] = to_float(cpu::from_float<T>(sum));
        total[j] = sums[j] + to_float(residuals[i][at]);
        squares += static_cast<double>(total[j]) * total[j];
      }
      const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden) + 1e-5);
      for (int rank = 0; rank < ranks; ++rank) {
        const Tensors<T>& got = tensors[rank][i];
        for (int64_t j = 0; j < hidden; ++j) {
          const int64_t at = row * hidden + j;
          if (!calls[i].with_norm) {
            check("sum", at, value(got.sum[at]), sums[j], 0);
            continue;
          }
          const double want = total[j] * scale * (value(weight[j]) + 0.5);
          check("residual_out", at, value(got.residual_out[at]), value(cpu::from_float<T>(total[j])), 0);
          check_rounded("norm_out", at, got.norm_out[at], want, 1e-6, std::fabs(want));
        }
      }
    }
  }
}

}  // namespace

void run() {
  // Two shots are faster from about 900 KB at 3 ranks, 400 KB at 4 and 115 KB at 8, and never at 2.
  for (const auto& [ranks, bytes] : {std::pair<int, int64_t>{3, 900'000}, {4, 400'000}, {8, 115'000}}) {
    check("choice", ranks, is_faster_in_two_shots(ranks, bytes), 0, 0);
    check("choice", ranks, is_faster_in_two_shots(ranks, bytes + bytes / 20), 1, 0);
  }
  check("choice", 2, is_faster_in_two_shots(2, int64_t{1} << 40), 0, 0);
  for (int ranks = 2; ranks <= 4 && failures == 0; ++ranks) {
    check_group<float>(ranks, 80);
    check_group<bfloat16_t>(ranks, 40);
    check_group<half_t>(ranks, 20);
  }
}
