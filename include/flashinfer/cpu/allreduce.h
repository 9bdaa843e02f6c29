// All-reduce, reduce-scatter and all-gather on the CPU between processes that share memory; equations and
// protocol in common/allreduce.h.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cpu/norm.h>
#include <flashinfer/cpu/parallel.h>
#include <flashinfer/cpu/simd/lanes.h>
#include <flashinfer/cpu/simd/quantize.h>
#include <flashinfer/cpu/simd/vec.h>

namespace flashinfer::cpu {

// One call of this rank: sends, receives and waits, with its call number and its deadline.
class RankCall {
 public:
  explicit RankCall(const AllReduceParams& p)
      : p_(p),
        group_(p.group),
        epoch_(__atomic_load_n(group_.state->epoch, __ATOMIC_RELAXED)),
        deadline_(now() + group_.timeout_ns) {}

  bool failed() const { return __atomic_load_n(&group_.state->failed, __ATOMIC_RELAXED) != 0; }

  void send_headers() const {
    for (int peer = 0; peer < group_.ranks; ++peer)
      if (peer != group_.rank && !failed())
        for (int i = 0; i < 4; ++i) __atomic_store_n(words_from(peer, epoch_ + 1) + i, kEmpty, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    const CallHeader header = header_of(p_, epoch_);
    for (int peer = 0; peer < group_.ranks; ++peer)
      if (peer != group_.rank && !failed())
        send(header_of(group_, peer, group_.rank, epoch_), reinterpret_cast<const uint8_t*>(&header), sizeof(header));
  }

  int owner_of(int64_t row) const { return static_cast<int>(row % group_.ranks); }

  void send_row_to(int peer, int64_t row, const uint8_t* data, int64_t bytes) const {
    if (!failed()) send(area_of(group_, peer, group_.rank, epoch_) + row * padded(bytes), data, bytes);
  }

  // Send the row to all peers, from the next rank on.
  void send_row(int64_t row, const uint8_t* data, int64_t bytes) const {
    for (int d = 1; d < group_.ranks; ++d) send_row_to((group_.rank + d) % group_.ranks, row, data, bytes);
  }

  // Receive a row of `sender` from the inbox, and clear its words. After an error the row is NaN.
  void receive_row(int64_t row, int sender, uint8_t* to, int64_t bytes) const {
    receive(area_of(group_, group_.rank, sender, epoch_) + row * padded(bytes), sender, to, bytes);
  }

  // Copy this rank's own row with the bits that its peers receive.
  static void copy_row(uint8_t* to, const uint8_t* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 4) {
      const uint32_t word = word_at(data, at, bytes);
      std::memcpy(to + at, &word, bytes - at < 4 ? bytes - at : 4);
    }
  }

  // Compare the headers of all ranks with this call, and end the call.
  void finish() const {
    for (int sender = 0; sender < group_.ranks; ++sender) {
      if (sender == group_.rank) continue;
      CallHeader theirs{};
      for (int64_t spin = 1; !has_header(sender, &theirs); ++spin) {
        if (spin % kSpinsPerYield == 0 && (yield(spin), must_stop(sender))) break;
      }
      if (!failed() && !is_same(theirs, header_of(p_, epoch_))) report(CommError::kMismatch, sender, theirs);
    }
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
    uint32_t expected = epoch_;
    if (!__atomic_compare_exchange_n(group_.state->epoch, &expected, epoch_ + 1, false, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED))
      report(CommError::kConcurrent, group_.rank, {});
  }

 private:
  static constexpr int kSpinsPerYield = 64, kSpinsBeforeSleep = 8192;

  // Lets other threads run. A long wait sleeps, because the rank that is late may need this CPU. On a busy
  // machine a yield takes milliseconds, so the caller checks the clock after each.
  static void yield(int64_t spin) {
    if (spin < kSpinsBeforeSleep) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  static uint64_t now() {
    using std::chrono::steady_clock;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(steady_clock::now().time_since_epoch()).count();
  }

  // Return the word at a byte of a row, padded with zeros at the row's end, as it is sent.
  static uint32_t word_at(const uint8_t* data, int64_t at, int64_t bytes) {
    uint32_t word = 0;
    std::memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
    return as_data(word);
  }

  static void send(uint8_t* to, const uint8_t* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 4)
      __atomic_store_n(reinterpret_cast<uint32_t*>(to + at), word_at(data, at, bytes), __ATOMIC_RELAXED);
  }

  void receive(uint8_t* from, int sender, uint8_t* to, int64_t bytes) const {
    for (int64_t at = 0; at < bytes; at += 4) {
      auto* address = reinterpret_cast<uint32_t*>(from + at);
      uint32_t word = __atomic_load_n(address, __ATOMIC_RELAXED);
      for (int64_t spin = 1; word == kEmpty; ++spin) {
        if (spin % kSpinsPerYield == 0 && (yield(spin), must_stop(sender))) break;
        word = __atomic_load_n(address, __ATOMIC_RELAXED);
      }
      if (word != kEmpty) __atomic_store_n(address, kEmpty, __ATOMIC_RELAXED);
      if (failed()) word = kEmpty;
      std::memcpy(to + at, &word, bytes - at < 4 ? bytes - at : 4);
    }
  }

  uint32_t* words_from(int sender, uint32_t epoch) const {
    return reinterpret_cast<uint32_t*>(header_of(group_, group_.rank, sender, epoch));
  }

  // Read the header of a rank. Return true if it has arrived.
  bool has_header(int sender, CallHeader* header) const {
    auto* to = reinterpret_cast<uint32_t*>(header);
    bool arrived = true;
    for (int i = 0; i < 4; ++i)
      arrived = (to[i] = __atomic_load_n(words_from(sender, epoch_) + i, __ATOMIC_RELAXED)) != kEmpty && arrived;
    return arrived;
  }

  // Return true if a wait for `sender` must end.
  bool must_stop(int sender) const {
    if (failed()) return true;
    CallHeader theirs{};
    CommError error = CommError::kNone;
    if (has_header(sender, &theirs) && !is_same(theirs, header_of(p_, epoch_))) {
      error = CommError::kMismatch;
    } else if (__atomic_load_n(&group_.report->abort, __ATOMIC_RELAXED) != 0) {
      error = CommError::kAborted;
    } else if (now() > deadline_) {
      error = CommError::kTimedOut;
      // With two shots, the rank that is late may itself wait for another rank.
      if (has_header(sender, &theirs))
        for (int other = group_.ranks - 1; other >= 0; --other)
          if (other != group_.rank && !has_header(other, &theirs)) sender = other;
    }
    if (error == CommError::kNone) return false;
    report(error, sender, theirs);
    return true;
  }

  // Record the first error of the workspace.
  void report(CommError error, int rank, const CallHeader& theirs) const {
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&group_.state->failed, &none, static_cast<uint32_t>(error), false,
                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return;
    CommReport& report = *group_.report;
    report.rank = rank, report.call = epoch_, report.theirs = theirs, report.ours = header_of(p_, epoch_);
    __atomic_store_n(&report.error, static_cast<uint32_t>(error), __ATOMIC_RELEASE);
  }

  const AllReduceParams& p_;
  const CommGroup& group_;
  const uint32_t epoch_;
  const uint64_t deadline_;
};

// Write quant_out from the rounded norm, and scale_out if scales are computed here.
template <typename T>
void quantize_norm(const AllReduceParams& p, const T* norm) {
  const int64_t n = p.hidden;
  const auto largest_of = [](const T* from, int64_t count) {
    float largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(to_float(from[i])));
    return largest;
  };
  const auto store = [](const T* from, int64_t count, fp8_e4m3_t* to, float factor, float divisor) {
    for_lanes(count, [&](int64_t i, int lanes) {
      store_quantized(to + i, load(from + i, lanes) * splat(factor) / splat(divisor), lanes);
    });
  };
  parallel_rows(p.rows, 2 * n * static_cast<int64_t>(sizeof(T)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const T* from = norm + row * n;
      auto* to = static_cast<fp8_e4m3_t*>(p.quant_out) + row * n;
      if (p.quant == NormQuant::kStatic) store(from, n, to, 1.0f / p.scale.get_float(), 1);
      if (p.quant == NormQuant::kToken) {
        const float scale = token_scale(largest_of(from, n));
        static_cast<float*>(p.scale_out)[row] = scale;
        store(from, n, to, 1, scale);
      }
      if (p.quant != NormQuant::kGroup) continue;
      const int64_t groups = n / p.columns;
      for (int64_t group = 0; group < groups; ++group) {
        const uint32_t exponent = group_exponent(largest_of(from + group * p.columns, p.columns)),
                       bits = exponent << 23;
        *exponent_of(p.scale_out, p, row, group) = static_cast<uint8_t>(exponent);
        float scale;
        std::memcpy(&scale, &bits, sizeof(scale));
        store(from + group * p.columns, p.columns, to + group * p.columns, 1, scale);
      }
      for (int64_t rest = groups; rest % 4 != 0; ++rest) *exponent_of(p.scale_out, p, row, rest) = 0;
    }
  });
}

// Add the parts of a row in the order of ranks, and round the sum.
template <typename T>
class RowSum {
 public:
  explicit RowSum(int64_t n) : part_(n), sum_(n) {}

  // Receive the row from all ranks. `own` is this rank's part. Return the sum as bytes, valid until the next
  // call.
  const uint8_t* take(const RankCall& call, const CommGroup& group, int64_t row, const uint8_t* own) {
    const int64_t n = part_.size(), bytes = n * static_cast<int64_t>(sizeof(T));
    auto* taken = reinterpret_cast<uint8_t*>(part_.data());
    for (int sender = 0; sender < group.ranks; ++sender) {
      if (sender == group.rank) {
        RankCall::copy_row(taken, own, bytes);
      } else {
        call.receive_row(row, sender, taken, bytes);
      }
      for_lanes(n, [&](int64_t i, int count) {
        const vfloat x = load(part_.data() + i, count);
        store(&sum_[i], sender == 0 ? x : load(&sum_[i], count) + x, count);
      });
    }
    for_lanes(n, [&](int64_t i, int count) { store(part_.data() + i, load(&sum_[i], count), count); });
    return taken;
  }

 private:
  std::vector<T> part_;
  std::vector<float> sum_;
};

// Add the parts of each row in the order of ranks. `residual_out` and `norm_out` may be `input` or
// `residual_in`: they are written after all sums are in `out`.
template <typename T>
void allreduce(const AllReduceParams& p) {
  const RankCall call(p);
  const int64_t n = p.hidden, bytes = n * static_cast<int64_t>(sizeof(T));
  const auto* input = static_cast<const uint8_t*>(p.input);
  const int rank = p.group.rank;
  call.send_headers();
  parallel_rows(p.rows, bytes * p.group.ranks, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      if (!p.two_shots) {
        call.send_row(row, input + row * bytes, bytes);
      } else if (call.owner_of(row) != rank) {
        call.send_row_to(call.owner_of(row), row, input + row * bytes, bytes);
      }
    }
  });
  std::vector<T> sums(p.out ? 0 : p.rows * n);
  T* out = p.out ? static_cast<T*>(p.out) : sums.data();
  parallel_rows(p.rows, bytes * p.group.ranks, [&](int64_t first, int64_t last) {
    RowSum<T> sum(n);
    for (int64_t row = first; row < last; ++row) {
      if (p.two_shots && call.owner_of(row) != rank) continue;
      const uint8_t* total = sum.take(call, p.group, row, input + row * bytes);
      RankCall::copy_row(reinterpret_cast<uint8_t*>(out + row * n), total, bytes);
      if (p.two_shots) call.send_row(row, total, bytes);
    }
  });
  if (p.two_shots) {
    parallel_rows(p.rows, bytes, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        if (call.owner_of(row) != rank)
          call.receive_row(row, call.owner_of(row), reinterpret_cast<uint8_t*>(out + row * n), bytes);
    });
  }
  call.finish();
  if (p.weight == nullptr) return;
  if (p.residual_out != p.residual_in) std::memcpy(p.residual_out, p.residual_in, p.rows * bytes);
  const Rows rows{p.rows < 1 ? 1 : p.rows, 1, 0, 0, n};
  std::vector<T> normed(p.norm_out ? 0 : p.rows * n);
  T* norm_out = p.norm_out ? static_cast<T*>(p.norm_out) : normed.data();
  const RmsNormTensors tensors{.input = out,
                               .residual = p.residual_out,
                               .weight = p.weight,
                               .output = norm_out,
                               .input_rows = rows,
                               .residual_rows = rows,
                               .output_rows = rows,
                               .num_rows = p.rows,
                               .hidden_size = n,
                               .eps = {p.eps, nullptr}};
  rms_norm<T>({tensors, p.weight_bias, p.dtype});
  if (p.quant != NormQuant::kNone) quantize_norm<T>(p, norm_out);
}

template <typename T>
void reduce_scatter(const AllReduceParams& p) {
  const RankCall call(p);
  const int64_t bytes = p.hidden * static_cast<int64_t>(sizeof(T));
  const auto* input = static_cast<const uint8_t*>(p.input);
  const int rank = p.group.rank, ranks = p.group.ranks;
  call.send_headers();
  parallel_rows(p.rows, bytes * ranks, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int d = 1; d < ranks; ++d) {
        const int peer = (rank + d) % ranks;
        call.send_row_to(peer, row, input + (peer * p.rows + row) * bytes, bytes);
      }
    }
  });
  parallel_rows(p.rows, bytes * ranks, [&](int64_t first, int64_t last) {
    RowSum<T> sum(p.hidden);
    for (int64_t row = first; row < last; ++row)
      RankCall::copy_row(static_cast<uint8_t*>(p.out) + row * bytes,
                         sum.take(call, p.group, row, input + (rank * p.rows + row) * bytes), bytes);
  });
  call.finish();
}

template <typename T>
void all_gather(const AllReduceParams& p) {
  const RankCall call(p);
  const int64_t bytes = p.hidden * static_cast<int64_t>(sizeof(T));
  const auto* input = static_cast<const uint8_t*>(p.input);
  auto* out = static_cast<uint8_t*>(p.out);
  const int ranks = p.group.ranks;
  call.send_headers();
  parallel_rows(p.rows, bytes * ranks, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) call.send_row(row, input + row * bytes, bytes);
  });
  parallel_rows(p.rows, bytes * ranks, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      for (int sender = 0; sender < ranks; ++sender) {
        uint8_t* to = out + (sender * p.rows + row) * bytes;
        if (sender == p.group.rank) {
          RankCall::copy_row(to, input + row * bytes, bytes);
        } else {
          call.receive_row(row, sender, to, bytes);
        }
      }
    }
  });
  call.finish();
}

}  // namespace flashinfer::cpu
