// Words of an inbox on CUDA: four are stored and polled at a time. The protocol is that of common/allreduce.h.
#pragma once

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cuda/ptx/system.cuh>
#include <flashinfer/cuda/ptx/timer.cuh>

namespace flashinfer::cuda {

constexpr int kSpinsPerCheck = 256;  // polls between two looks at the clock and at the host's memory

__device__ __forceinline__ uint4 empty_words() { return make_uint4(kEmpty, kEmpty, kEmpty, kEmpty); }

__device__ __forceinline__ uint4 as_data(const uint4& v) {
  return make_uint4(flashinfer::as_data(v.x), flashinfer::as_data(v.y), flashinfer::as_data(v.z),
                    flashinfer::as_data(v.w));
}

__device__ __forceinline__ bool has_arrived(const uint4& v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

__device__ __forceinline__ uint4 words_of(const CallHeader& h) {
  return make_uint4(h.call, h.rows, h.row_bytes, h.kind);
}
__device__ __forceinline__ CallHeader header_in(const uint4& v) { return {v.x, v.y, v.z, v.w}; }

// Records the first error of a workspace: for later kernels in its state, for the host in its report.
__device__ __forceinline__ void report_error(const AllReduceParams& p, CommError error, int rank, uint32_t epoch,
                                             const uint4& theirs) {
  if (atomicCAS(&p.group.state->failed, 0u, static_cast<uint32_t>(error)) != 0u) return;
  volatile CommReport& report = *p.group.report;
  const CallHeader other = header_in(theirs), own = header_of(p, epoch);
  report.rank = rank, report.call = epoch;
  report.theirs.call = other.call, report.theirs.rows = other.rows;
  report.theirs.row_bytes = other.row_bytes, report.theirs.kind = other.kind;
  report.ours.call = own.call, report.ours.rows = own.rows;
  report.ours.row_bytes = own.row_bytes, report.ours.kind = own.kind;
  ptx::fence_sys();
  ptx::store_relaxed_sys(&p.group.report->error, static_cast<uint32_t>(error));
}

// Returns true if a wait for `sender` must end: another wait has failed, the host aborts, the sender makes another
// call, or the time is over.
__device__ __forceinline__ bool must_stop(const AllReduceParams& p, int sender, uint32_t epoch, uint64_t deadline) {
  if (*reinterpret_cast<volatile uint32_t*>(&p.group.state->failed) != 0u) return true;
  CommError error = CommError::kNone;
  const uint4 theirs = ptx::load4_relaxed_sys(header_of(p.group, p.group.rank, sender, epoch));
  if (has_arrived(theirs) && !is_same(header_in(theirs), header_of(p, epoch))) {
    error = CommError::kMismatch;
  } else if (ptx::load_relaxed_sys(&p.group.report->abort) != 0u) {
    error = CommError::kAborted;
  } else if (ptx::globaltimer() > deadline) {
    error = CommError::kLate;
  }
  if (error == CommError::kNone) return false;
  report_error(p, error, sender, epoch, theirs);
  return true;
}

// Polls four words until all are data. Returns empty words after an error. Inlined: around a call, the kernels of 8
// ranks had to spill registers.
__device__ __forceinline__ uint4 wait_for(const AllReduceParams& p, const uint8_t* from, int sender, uint32_t epoch) {
  const uint64_t deadline = ptx::globaltimer() + p.group.timeout_ns;
  for (int spin = 1;; ++spin) {
    const uint4 words = ptx::load4_relaxed_sys(from);
    if (has_arrived(words)) return words;
    if (spin % kSpinsPerCheck == 0 && must_stop(p, sender, epoch, deadline)) return empty_words();
  }
}

// Returns four words of `sender` at `from` once all are data, and empties them. `words` were loaded from there. After
// an error returns empty words, which are NaN, and sets `failed`: later calls of this thread do not wait.
__device__ __forceinline__ uint4 take(const AllReduceParams& p, uint4 words, uint8_t* from, int sender, uint32_t epoch,
                                      bool& failed) {
  if (!failed && !has_arrived(words)) {
    words = wait_for(p, from, sender, epoch);
    failed = words.x == kEmpty;
  }
  if (failed) return empty_words();
  ptx::store_relaxed_sys(from, empty_words());
  return words;
}

}  // namespace flashinfer::cuda
