// Track of events of a warpgroup. A disabled track has no members and compiles to no instruction and no
// register. tests/hopper/test_profiler.py verifies this in the SASS.
//
// In wgmma code an event belongs after a wait: between issue and wait it would measure the issue only.
#pragma once

#include <cstdint>

#include <flashinfer/common/profiler.h>
#include <flashinfer/cuda/ptx/store_clock.cuh>
#include <flashinfer/cuda/ptx/timer.cuh>

namespace flashinfer::cuda {

// Return the number of tracks of a CTA.
FLASHINFER_HD constexpr int profiler_groups(int threads) { return (threads + 127) / 128; }

template <bool kOn>
struct Profiler {
  template <typename Params>
  __device__ __forceinline__ explicit Profiler(const Params&) {}
  __device__ __forceinline__ void begin(Event) const {}
  __device__ __forceinline__ void end(Event) const {}
  __device__ __forceinline__ void switch_to(Event) const {}
  __device__ __forceinline__ void instant(Event) const {}
  __device__ __forceinline__ void finish() const {}
};

// All threads of a warpgroup count, and the first one writes. A record costs a clock read and a store.
template <>
struct Profiler<true> {
  const ProfilerBuffer& buffer;
  uint32_t count = 0, next;  // number of events; index of the next record, or the buffer's end if full

  // Call this after wait_for_inputs(): the previous kernel may write to the same buffer.
  template <typename Params>
  __device__ __forceinline__ explicit Profiler(const Params& params) : buffer(params.profiler) {
    if (blockIdx.x == 0 && threadIdx.x == 0) buffer.words[0] = buffer.first;
    write_ends(0, ptx::multiprocessor());
    write_ends(2, 0);
    next = writes() ? 1 + kTrackWords * static_cast<uint32_t>(buffer.tracks) + track() : buffer.end;
  }

  __device__ __forceinline__ void begin(Event event) { note(kBegin, event); }
  __device__ __forceinline__ void end(Event event) { note(kEnd, event); }
  // End the last event and begin another, in one record.
  __device__ __forceinline__ void switch_to(Event event) { note(kTurn, event); }
  __device__ __forceinline__ void instant(Event event) { note(kInstant, event); }
  // Close the track. A track that is never closed has no events.
  __device__ __forceinline__ void finish() const { write_ends(2, count); }

 private:
  __device__ __forceinline__ static uint32_t track() {
    return blockIdx.x * profiler_groups(static_cast<int>(blockDim.x)) + threadIdx.x / 128;
  }
  __device__ __forceinline__ bool writes() const { return threadIdx.x % 128 == 0 && buffer.tracks > 0; }

  __device__ __forceinline__ void write_ends(int number, uint32_t low) const {
    if (!writes()) return;
    buffer.word(number, track()) = words_of(low, ptx::clock_low());
    buffer.word(number + 1, track()) = ptx::globaltimer();
  }

  __device__ __forceinline__ void note(EventKind kind, Event event) {
    ptx::store_clock_before(buffer.end, buffer.words, next, tag_of(kind, event), static_cast<uint32_t>(buffer.tracks));
    count += kind == kTurn ? 2 : 1;
  }
};

// Return the parameters of a launch with its buffer divided among the tracks.
template <typename Params>
Params with_tracks(const Params& params, int64_t blocks, int threads) {
  Params divided = params;
  if constexpr (Params::kProfiler) divided.profiler.divide(blocks, profiler_groups(threads), Clock::kCycles);
  return divided;
}

}  // namespace flashinfer::cuda
