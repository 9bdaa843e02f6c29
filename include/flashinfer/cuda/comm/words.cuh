// Words of an inbox on CUDA. A thread stores and polls four at a time. common/allreduce.h describes the
// protocol.
#pragma once

#include <flashinfer/common/allreduce.h>
#include <flashinfer/cuda/ptx/system.cuh>
#include <flashinfer/cuda/ptx/timer.cuh>

namespace flashinfer::cuda {

constexpr int kSpinsPerCheck = 256;  // polls between two checks of errors and of the clock

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

// Result of a thread's waits. 0: no error. kFailedBefore: another thread or call has recorded an error.
// Otherwise CommError << 8 | rank: this thread found the error first, and must report it.
using Failure = uint32_t;
constexpr Failure kFailedBefore = 1u << 31;

// Return the number of this call. The load bypasses the L1 cache, because other SMs wrote it in the previous
// call.
__device__ __forceinline__ uint32_t call_number(const AllReduceParams& p) {
  return ptx::load_relaxed_sys(&p.group.state->epoch[blockIdx.x]);
}

__device__ __forceinline__ Failure earlier_failure(const AllReduceParams& p) {
  return ptx::load_relaxed_sys(&p.group.state->failed) != 0u ? kFailedBefore : 0;
}

// Record an error in group.state, if it has none yet. All other waits poll it and end.
__device__ __forceinline__ Failure fail(const AllReduceParams& p, CommError error, int rank) {
  const bool is_first = atomicCAS(&p.group.state->failed, 0u, static_cast<uint32_t>(error)) == 0u;
  return is_first ? static_cast<uint32_t>(error) << 8 | rank : kFailedBefore;
}

// Write the error that this thread found to the host's memory. Kernels call it once, at their end. In
// wait_for() its code would be inlined once per rank.
__device__ __forceinline__ void report_failure(const AllReduceParams& p, Failure failure, uint32_t epoch) {
  if (failure == 0 || failure == kFailedBefore) return;
  int rank = failure & 0xff;
  CallHeader theirs{};
  if (rank != p.group.rank) {  // a group of one rank has no inbox
    const auto header = [&](int sender) {
      return ptx::load4_relaxed_sys(header_of(p.group, p.group.rank, sender, epoch));
    };
    // With two shots, the rank that is late may itself wait for another rank.
    if (failure >> 8 == static_cast<uint32_t>(CommError::kTimedOut) && has_arrived(header(rank)))
      for (int other = p.group.ranks - 1; other >= 0; --other)
        if (other != p.group.rank && !has_arrived(header(other))) rank = other;
    theirs = header_in(header(rank));
  }
  p.group.report->rank = rank;
  p.group.report->call = epoch;
  p.group.report->theirs = theirs;
  p.group.report->ours = header_of(p, epoch);
  ptx::fence_sys();
  ptx::store_relaxed_sys(&p.group.report->error, failure >> 8);
}

// Return true in the thread that reads the host's flag and finds it set. One of all waiting threads reads it in
// each period of 65 us. A read takes 0.5 us. When each warp read it, a sum of 1 MiB took 1 ms (two H100).
__device__ __forceinline__ bool is_aborted(const AllReduceParams& p, uint32_t time) {
  uint32_t* abort_read_time = &p.group.state->abort_read_time;
  return *reinterpret_cast<volatile uint32_t*>(abort_read_time) != time && atomicExch(abort_read_time, time) != time &&
         ptx::load_relaxed_sys(&p.group.report->abort) != 0u;
}

// Return a failure if a wait for `sender` must end: another wait has failed, the sender makes another call,
// the host aborts, or the timeout has passed. The first check sets `began`, in units of 65 us: a 64-bit time
// would spill a register.
__device__ __forceinline__ Failure check_wait(const AllReduceParams& p, int sender, uint32_t epoch, uint32_t& began) {
  if (const Failure before = earlier_failure(p)) return before;
  const uint4 theirs = ptx::load4_relaxed_sys(header_of(p.group, p.group.rank, sender, epoch));
  if (has_arrived(theirs) && !is_same(header_in(theirs), header_of(p, epoch)))
    return fail(p, CommError::kMismatch, sender);
  const uint32_t time = static_cast<uint32_t>(ptx::globaltimer() >> 16);
  if (began == 0) began = time;
  if (is_aborted(p, time)) return fail(p, CommError::kAborted, sender);
  return time - began > p.group.timeout_ns >> 16 ? fail(p, CommError::kTimedOut, sender) : 0;
}

// Polls four words of `sender` at `from` until all are data. `words` is the result of the first load. After a
// failure, returns empty words, which are NaN, and later waits of this thread return at once. It is inlined,
// because kernels spilled registers around a call.
__device__ __forceinline__ uint4 wait_for(const AllReduceParams& p, uint4 words, const uint8_t* from, int sender,
                                          uint32_t epoch, Failure& failure) {
  if (failure == 0 && !has_arrived(words)) {
    uint32_t began = 0;
    for (int spin = 1; failure == 0; ++spin) {
      words = ptx::load4_relaxed_sys(from);
      if (has_arrived(words)) break;
      if (spin % kSpinsPerCheck == 0) failure = check_wait(p, sender, epoch, began);
    }
  }
  return failure == 0 ? words : empty_words();
}

// Waits for four words and empties them.
__device__ __forceinline__ uint4 receive(const AllReduceParams& p, uint4 words, uint8_t* from, int sender,
                                         uint32_t epoch, Failure& failure) {
  words = wait_for(p, words, from, sender, epoch, failure);
  if (failure == 0) ptx::store_relaxed_sys(from, empty_words());
  return words;
}

// Compare the call of `sender` with this one, and acquire the header.
__device__ __forceinline__ void compare_headers(const AllReduceParams& p, int sender, uint32_t epoch,
                                                Failure& failure) {
  const uint8_t* from = header_of(p.group, p.group.rank, sender, epoch);
  wait_for(p, ptx::load4_relaxed_sys(from), from, sender, epoch, failure);
  const CallHeader theirs = header_in(ptx::load4_acquire_sys(from));
  if (failure == 0 && !is_same(theirs, header_of(p, epoch))) failure = fail(p, CommError::kMismatch, sender);
}

}  // namespace flashinfer::cuda
