// What kernels note of themselves while they run, and the buffer that takes it.
//
// A track notes one event after the other: a warpgroup of a block, or a worker of a CPU. Words have 64 bits:
//   0                   blocks | groups << 32 | Clock << 48
//   1 + n * tracks + t  word n of track t = block * groups + group, so that neighbours write side by side
// The words of a track, low and high half:
//   0      multiprocessor, or worker; the clock at its start
//   1      the time at its start, ns
//   2      how many begins, ends and instants there were, two of them in a record that turns; the clock at its end
//   3      the time at its end, ns
//   4 ...  kind | event << 2; the clock
// Records that there is no room for are counted and not written. flashinfer/_profiler/buffer.py reads all this.
#pragma once

#include <cstdint>

#include <flashinfer/common/rows.h>

namespace flashinfer {

// flashinfer/_profiler/buffer.py has their names in this order.
enum class Event : uint32_t {
  kItem,
  kLoadQuery,
  kLoadKv,
  kWaitQuery,
  kWaitKeys,
  kWaitValues,
  kWaitMaxima,
  kWaitWeights,
  kPackKv,
  kGemmQk,
  kSoftmax,
  kGemmPv,
  kAttend,
  kWriteOutput,
};
// kTurn: what was begun last ends, and this begins.
enum EventKind : uint32_t { kBegin, kEnd, kInstant, kTurn };
// What a track's clock counts: cycles of its multiprocessor, or nanoseconds.
enum class Clock : uint64_t { kCycles = 1, kNanoseconds = 2 };

constexpr int kTrackWords = 4;  // of a track, before its events

FLASHINFER_HD constexpr uint64_t words_of(uint32_t low, uint32_t high) {
  return low | static_cast<uint64_t>(high) << 32;
}
FLASHINFER_HD constexpr uint32_t tag_of(EventKind kind, Event event) {
  return kind | static_cast<uint32_t>(event) << 2;
}

struct ProfilerBuffer {
  uint64_t* words;
  int64_t size;    // in words, 1 or more
  int64_t tracks;  // 0: there is no room for a track's first words
  uint64_t first;  // word 0
  uint32_t room;   // for records of a track
  uint32_t end;    // the word behind all tracks

  // For a kernel of that many blocks with as many groups each.
  void divide(int64_t blocks, int32_t groups, Clock clock) {
    first = static_cast<uint64_t>(blocks) | static_cast<uint64_t>(groups) << 32 | static_cast<uint64_t>(clock) << 48;
    tracks = blocks * groups;
    const int64_t words = size <= INT32_MAX ? size : INT32_MAX;  // what numbers of words have room for
    const int64_t each = tracks > 0 ? (words - 1) / tracks : 0;
    if (each < kTrackWords) tracks = 0;
    room = tracks > 0 ? static_cast<uint32_t>(each - kTrackWords) : 0;
    end = tracks > 0 ? static_cast<uint32_t>(1 + each * tracks) : 0;
  }

  FLASHINFER_HD uint64_t& word(int64_t number, int64_t track) const { return words[1 + number * tracks + track]; }
};

// Parameters of kernels that write events, or of kernels that do not: the value of the axis `profiler`.
template <typename Params, bool kOn>
struct Profiled : Params {};
template <typename Params>
struct Profiled<Params, true> : Params {
  static constexpr bool kProfiler = true;
  ProfilerBuffer profiler;
};

}  // namespace flashinfer
