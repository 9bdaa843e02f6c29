// Events that kernels record while they run, and the layout of their buffer.
//
// A track is the sequence of events of a warpgroup of a CTA, or of a CPU worker. Words have 64 bits:
//   0                   blocks | groups << 32 | Clock << 48
//   1 + n * tracks + t  word n of track t = block * groups + group, so that adjacent tracks write adjacent
//   words
// Words of a track, low and high half:
//   0      multiprocessor or worker; clock at its start
//   1      time at its start, ns
//   2      number of events, where kTurn counts twice; clock at its end
//   3      time at its end, ns
//   4 ...  kind | event << 2; clock
// Records that exceed the capacity are counted and not written. flashinfer/_profiler/buffer.py reads this
// layout.
#pragma once

#include <cstdint>

#include <flashinfer/common/rows.h>

namespace flashinfer {

// flashinfer/_profiler/buffer.py lists their names in this order.
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
// kTurn ends the last event that began, and begins this one.
enum EventKind : uint32_t { kBegin, kEnd, kInstant, kTurn };
// Unit of a track's clock: cycles of its multiprocessor, or nanoseconds.
enum class Clock : uint64_t { kCycles = 1, kNanoseconds = 2 };

constexpr int kTrackWords = 4;  // header words of a track

FLASHINFER_HD constexpr uint64_t words_of(uint32_t low, uint32_t high) {
  return low | static_cast<uint64_t>(high) << 32;
}
FLASHINFER_HD constexpr uint32_t tag_of(EventKind kind, Event event) {
  return kind | static_cast<uint32_t>(event) << 2;
}

struct ProfilerBuffer {
  uint64_t* words;
  int64_t size;       // in words, 1 or more
  int64_t tracks;     // 0: the buffer is too small for the headers
  uint64_t first;     // word 0
  uint32_t capacity;  // records per track
  uint32_t end;       // first word after all tracks

  // Lay out the buffer for a kernel of `blocks` CTAs with `groups` tracks each.
  void divide(int64_t blocks, int32_t groups, Clock clock) {
    first = static_cast<uint64_t>(blocks) | static_cast<uint64_t>(groups) << 32 | static_cast<uint64_t>(clock) << 48;
    tracks = blocks * groups;
    const int64_t words = size <= INT32_MAX ? size : INT32_MAX;  // word indices are 32-bit
    const int64_t each = tracks > 0 ? (words - 1) / tracks : 0;
    if (each < kTrackWords) tracks = 0;
    capacity = tracks > 0 ? static_cast<uint32_t>(each - kTrackWords) : 0;
    end = tracks > 0 ? static_cast<uint32_t>(1 + each * tracks) : 0;
  }

  FLASHINFER_HD uint64_t& word(int64_t number, int64_t track) const { return words[1 + number * tracks + track]; }
};

// Kernel parameters with or without a profiler buffer: the axis `profiler`.
template <typename Params, bool kOn>
struct Profiled : Params {};
template <typename Params>
struct Profiled<Params, true> : Params {
  static constexpr bool kProfiler = true;
  ProfilerBuffer profiler;
};

}  // namespace flashinfer
