// A kernel's track of events on a CPU: threads of a grid one after the other, a clock that counts. track.cc
// SIZE BLOCKS THREADS STEPS writes words of a buffer of that size, with 16 around it, to the standard output.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __device__
#define __forceinline__ inline
struct Index {
  unsigned x;
};
static Index blockIdx, threadIdx, blockDim;

#include <flashinfer/cuda/profiler.cuh>

using flashinfer::Event;

struct Params {
  static constexpr bool kProfiler = true;
  flashinfer::ProfilerBuffer profiler;
};

// In a block's first warpgroup an item with turns; in others pairs alone.
static void run(const Params& params, int steps) {
  flashinfer::cuda::Profiler<true> profiler(params);
  profiler.begin(Event::kItem);
  if (threadIdx.x < 128) {
    profiler.begin(Event::kLoadQuery);
    for (int i = 0; i < steps; ++i) profiler.switch_to(Event::kGemmQk), profiler.switch_to(Event::kSoftmax);
    profiler.end(Event::kSoftmax);
  } else {
    for (int i = 0; i < steps; ++i) profiler.begin(Event::kLoadKv), profiler.end(Event::kLoadKv);
    profiler.instant(Event::kPackKv);
  }
  profiler.end(Event::kItem);
  profiler.finish();
}

int main(int, char** args) {
  constexpr int kAround = 16;
  const long size = std::atol(args[1]);
  const int blocks = std::atoi(args[2]), threads = std::atoi(args[3]), steps = std::atoi(args[4]);
  std::vector<uint64_t> memory(size + 2 * kAround, 0x5EED5EED5EED5EED);
  Params params{};
  params.profiler.words = memory.data() + kAround, params.profiler.size = size;
  params = flashinfer::cuda::with_tracks(params, blocks, threads);
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(blocks); ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) run(params, steps);
  std::fwrite(memory.data(), sizeof(uint64_t), memory.size(), stdout);
}
