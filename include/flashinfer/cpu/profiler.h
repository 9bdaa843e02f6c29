// Track of events of a worker, in nanoseconds of a monotonic clock. A disabled track does nothing.
#pragma once

#include <chrono>
#include <cstdint>

#include <flashinfer/common/profiler.h>
#include <flashinfer/cpu/parallel.h>

namespace flashinfer::cpu {

template <bool kOn>
struct Profiler {
  template <typename Params>
  Profiler(const Params&, int64_t) {}
  void begin(Event) const {}
  void end(Event) const {}
  void instant(Event) const {}
  void finish() const {}
};

template <>
struct Profiler<true> {
  const ProfilerBuffer& buffer;
  const uint32_t track;
  uint32_t count = 0;

  template <typename Params>
  Profiler(const Params& params, int64_t worker) : buffer(params.profiler), track(static_cast<uint32_t>(worker)) {
    write_ends(0, track);
    write_ends(2, 0);
  }

  void begin(Event event) { note(kBegin, event); }
  void end(Event event) { note(kEnd, event); }
  void instant(Event event) { note(kInstant, event); }
  void finish() const { write_ends(2, count); }

 private:
  static uint64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
  }

  void write_ends(int number, uint32_t low) const {
    if (track >= buffer.tracks) return;
    const uint64_t time = now();
    buffer.word(number, track) = words_of(low, static_cast<uint32_t>(time));
    buffer.word(number + 1, track) = time;
  }

  void note(EventKind kind, Event event) {
    if (track < buffer.tracks && count < buffer.capacity)
      buffer.word(kTrackWords + count, track) = words_of(tag_of(kind, event), static_cast<uint32_t>(now()));
    ++count;
  }
};

// Return the parameters of a call with its buffer divided among the largest possible number of workers.
// Workers without tasks have no events.
template <typename Params>
Params with_tracks(const Params& params) {
  Params divided = params;
  if constexpr (Params::kProfiler) {
    ProfilerBuffer& buffer = divided.profiler;
    buffer.divide(num_threads(), 1, Clock::kNanoseconds);
    buffer.words[0] = buffer.first;
    for (int64_t track = 0; track < buffer.tracks; ++track)
      for (int number = 0; number < kTrackWords; ++number) buffer.word(number, track) = 0;
  }
  return divided;
}

}  // namespace flashinfer::cpu
