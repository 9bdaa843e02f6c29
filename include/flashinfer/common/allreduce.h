// All-reduce, reduce-scatter and all-gather over memory that the ranks of a group share: layout and protocol
// of that memory, and parameters of the kernels.
//
// Each rank has an inbox that its peers write. Each 32-bit word of it is either empty or data, so a word is
// its own flag. A sender stores words in any order. The reader polls a word until it is data, then clears it
// to empty. Empty is a NaN in float32 and in both halves of float16 and bfloat16. If a payload word has these
// bits, the sender stores another NaN instead, so no number changes.
//
// Call e uses slot e % 2. Two slots suffice. A peer writes the slot again in call e + 2. By then it has
// received all words that this rank sent in call e + 1, and this rank sent them after it had read and cleared
// the words of call e. The header of call e + 1 makes the clears visible first: a fence precedes the store of
// the header, and the peer acquires the header before call e + 2. A reader does not clear a header when it
// has read it, but before it sends its next header. After a timeout, the headers therefore still show which
// rank is missing.
//
// With one shot, each rank sends its input to all peers, and all ranks add the same parts. With two shots,
// each part has an owner: all ranks send it their inputs of the part, and it sends the sum back. Both hops
// use the same words of an area, because the owner is the reader in the first hop and the sender in the
// second. One shot moves (n - 1) N bytes per rank, two shots move 2 (n - 1) / n N, and the second hop takes
// about 1.7 us. Both give the same bits.
//
// Reduce-scatter is the first hop of two shots, and all-gather is the second. The share of a rank is a
// contiguous block of rows. Both move (n - 1) / n of the whole tensor.
#pragma once

#include <cstring>

#include <flashinfer/common/dtype.h>
#include <flashinfer/common/quant_scale.h>
#include <flashinfer/common/rows.h>

namespace flashinfer {

constexpr int kMaxRanks = 16;
constexpr int kSlots = 2;
constexpr int kEpochWords = 1056;   // eight CTAs on each of 132 multiprocessors: the largest grid
constexpr int64_t kPartBytes = 16;  // rows are padded to multiples of it
constexpr uint32_t kEmpty = 0xffffffffu;
constexpr uint32_t kReplacement = 0xffff7fffu;  // sent instead of a payload word that equals kEmpty

// Threads of a CUDA kernel. A CTA, or a cluster that has a row of the norm, sends and adds one piece at a
// time, with one part in each thread.
// - If all parts fit the SMs at once, small CTAs have the lowest latency: 128 x 4096 with the norm took 7.0 us
//   with 128 threads, and 7.8 us with 512.
// - Otherwise large pieces use NVLink better: the sum of 2048 x 8192 took 96 us, with 128 threads 128 us.
// - With the norm, 1024 threads on an SM cover the latency of its other tensors: 2048 x 8192 took 101 us,
//   with 512 threads 113 us. The sum alone took the same time (96 us).
// All on two H100, in bfloat16. The bits do not depend on these numbers.
struct PieceShape {
  int cta_threads, sm_threads;  // at most
};
constexpr PieceShape kSmallPieces{128, 512}, kSumPieces{512, 512}, kNormPieces{512, 1024};

// Return the shape for a call of `parts` on `num_sms` SMs. If ranks share a GPU, their CTAs must be resident
// at the same time, so each takes 512 threads on its SMs.
inline PieceShape piece_shape(int64_t parts, int num_sms, bool with_norm, bool shares_gpu) {
  if (parts <= int64_t{num_sms} * kSmallPieces.sm_threads) return kSmallPieces;
  return with_norm && !shares_gpu ? kNormPieces : kSumPieces;
}

enum class CommError : uint32_t { kNone, kTimedOut, kMismatch, kAborted, kConcurrent };

// Memory of one rank that only its own kernels access.
struct CommState {
  uint32_t epoch[kEpochWords];  // number of the next call. Between two calls, all words are equal
  uint32_t failed;              // CommError
  uint32_t abort_read_time;     // time of the last read of CommReport::abort, in units of 2^16 ns
};

// Properties of a call that must be equal on all ranks.
struct CallHeader {
  uint32_t call, rows, row_bytes, kind;
};

// Memory of the host that kernels also access. `error` is written last.
struct CommReport {
  uint32_t error, rank, call;
  CallHeader theirs, ours;
  uint32_t abort;  // written by the host: all waits end
};

// The group as a call sees it.
struct CommGroup {
  CommState* state;
  CommReport* report;
  int rank, ranks, num_sms;
  int64_t slot_bytes;  // bytes of one sender in one slot
  uint64_t timeout_ns;
  uint8_t* inbox[kMaxRanks];  // by rank, as this rank addresses them
};

// Scales of the quantised norm: none, one from the caller, one per row, or one power of two per group of
// columns.
enum class NormQuant : int32_t { kNone, kStatic, kToken, kGroup };

// Bytes that NVLink moves in the time of a hop: 1.7 us at 360 GB/s (two H100).
constexpr int64_t kHopBytes = 612'000;

// Return true if two shots move an input of `bytes` faster. For two ranks they move as many bytes as one
// shot.
FLASHINFER_HD bool is_faster_in_two_shots(int64_t ranks, int64_t bytes) {
  return ranks > 2 && bytes * (ranks - 1) * (ranks - 2) > kHopBytes * ranks;
}

constexpr float kMinTokenScale = 1.0f / (512 * kMaxE4M3);
constexpr float kMinGroupMaximum = 1e-10f;  // of a group of zeros

enum class Collective : uint32_t { kAllReduce, kReduceScatter, kAllGather, kMoeDispatch, kMoeCombine };

// s = sum of `input` over the ranks, in float32 in the order of ranks, rounded to the element type. With
// `weight`: r = s + residual_in, n = r / sqrt(mean(r^2) + eps) * (weight + weight_bias), rounded to the
// element type, and quant_out = n / scale in e4m3, clamped to the finite range.
//
// In reduce-scatter, `input` has `rows` rows for each rank, and `out` is s of the rows of this rank. In
// all-gather, `out` has the `rows` rows of the `input` of each rank. The smaller tensor may be the share of
// this rank in the larger one.
struct AllReduceParams {
  CommGroup group;
  const void* input;
  const void* residual_in;
  const void* weight;  // null: the sum only
  void* out;           // s, null if unwanted
  void* residual_out;  // r
  void* norm_out;      // n, null if unwanted
  void* quant_out;     // null without `quant`
  void* scale_out;     // kToken: float32 [rows]; kGroup: int32 [rows, words], four exponents in a word
  QuantScale scale;    // kStatic
  NormQuant quant;
  int columns;                                  // of a group
  int64_t scale_row_stride, scale_word_stride;  // kGroup, in words
  int64_t rows, hidden;
  uint32_t row_bytes, kind;  // for the header: kind_of()
  bool two_shots;
  double eps;
  float weight_bias;
  DType dtype;
};

inline uint32_t kind_of(DType dtype, bool with_norm, NormQuant quant, bool two_shots) {
  return static_cast<uint32_t>(dtype) | (with_norm ? 0x100u : 0u) | static_cast<uint32_t>(quant) << 9 |
         (two_shots ? 0x800u : 0u);
}
inline uint32_t kind_of(DType dtype, Collective collective) {
  return static_cast<uint32_t>(dtype) | static_cast<uint32_t>(collective) << 12;
}

FLASHINFER_HD float token_scale(float maximum) {
  const float scale = maximum / kMaxE4M3;
  return scale > kMinTokenScale ? scale : kMinTokenScale;
}

// Return the exponent field of the smallest power of two that scales the largest magnitude of a group to at
// most 448.
FLASHINFER_HD uint32_t group_exponent(float maximum) {
  const float scale = (maximum > kMinGroupMaximum ? maximum : kMinGroupMaximum) / kMaxE4M3;
  uint32_t bits;
  memcpy(&bits, &scale, sizeof(bits));
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
  return exponent < 254 ? exponent : 254;
}

// Return the byte of scale_out for a row's group: the exponents of four groups are the bytes of a word.
FLASHINFER_HD uint8_t* exponent_of(void* scale_out, const AllReduceParams& p, int64_t row, int64_t group) {
  return static_cast<uint8_t*>(scale_out) + (row * p.scale_row_stride + group / 4 * p.scale_word_stride) * 4 +
         group % 4;
}

// --- layout of an inbox: headers of both slots, then both slots, each with one area per peer ---

constexpr int64_t kHeaderBytes = kSlots * kMaxRanks * static_cast<int64_t>(sizeof(CallHeader));

FLASHINFER_HD uint8_t* header_of(const CommGroup& group, int reader, int sender, uint32_t epoch) {
  return group.inbox[reader] + (epoch % kSlots * kMaxRanks + sender) * sizeof(CallHeader);
}

FLASHINFER_HD uint8_t* area_of(const CommGroup& group, int reader, int sender, uint32_t epoch) {
  const int index = sender < reader ? sender : sender - 1;
  return group.inbox[reader] + kHeaderBytes +
         (static_cast<int64_t>(epoch % kSlots) * (group.ranks - 1) + index) * group.slot_bytes;
}

FLASHINFER_HD int64_t padded(int64_t bytes) { return (bytes + kPartBytes - 1) / kPartBytes * kPartBytes; }

FLASHINFER_HD uint32_t as_data(uint32_t word) { return word == kEmpty ? kReplacement : word; }

FLASHINFER_HD CallHeader header_of(const AllReduceParams& p, uint32_t epoch) {
  return {epoch & 0x7fffffffu, static_cast<uint32_t>(p.rows), p.row_bytes, p.kind};
}

FLASHINFER_HD bool is_same(const CallHeader& a, const CallHeader& b) {
  return a.call == b.call && a.rows == b.rows && a.row_bytes == b.row_bytes && a.kind == b.kind;
}

struct Launch;
void allreduce(const AllReduceParams& params, const Launch& launch);
void reduce_scatter(const AllReduceParams& params, const Launch& launch);
void all_gather(const AllReduceParams& params, const Launch& launch);

}  // namespace flashinfer
