// Launch kernels with the shapes of the sampling family for rows of every length, each without an earlier
// request for shared memory.
//
// argv: compute capability, SMs and bytes of shared memory of the devices.
#include <flashinfer/cuda/sampling/launch.cuh>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "driver.h"

using namespace flashinfer;
using cuda::Shape;

// Static shared memory equals that of the family's kernels: Scratch, and the sums of the warps of a row in
// cluster memory.
__global__ void search(int* out) {
  cuda::set_scratch([&](cuda::Scratch& s) { s.counter = 1; });
  *out = static_cast<int>(cuda::scratch().counter);
}
__global__ void hold(int* out) {
  volatile __shared__ uint64_t parts[cuda::kClusterSmemWarps];
  cuda::set_scratch([&](cuda::Scratch& s) { s.counter = 1; });
  parts[threadIdx.x % cuda::kClusterSmemWarps] = threadIdx.x;
  *out = static_cast<int>(cuda::scratch().counter + parts[0]);
}

int main(int count, char** words) {
  if (count != 5) return 2;
  driver::model = {std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]), std::atoi(words[4])};
  driver::read_statics();
  std::vector<int64_t> lengths;  // first and last length of each number of chunks
  for (int64_t chunks = 1; chunks <= 32768; chunks += chunks < 1400 ? 1 : 61)
    lengths.push_back(chunks * kSumChunk), lengths.push_back(chunks * kSumChunk - kSumChunk + 1);
  lengths.push_back(int64_t{1} << 24);
  int fresh = 1, near = 0, failures = 0;
  int64_t longest[2] = {0, 0};
  const int64_t promised[2] = {cuda::longest_row(false, 0), cuda::longest_row(true, 0)};
  for (const int64_t most : promised) lengths.push_back(most);
  static int out;
  for (const int64_t rows : {1, 4, 16, 40, 70, 140, 280}) {
    for (const int64_t vocab : lengths) {
      const auto run = [&](const Shape& shape, auto launch, int64_t* served) {
        if (shape.bytes == 0) return;
        for (const bool alone : {false, true}) {
          // Earlier launches on device 0 may have raised the limit; launches near it use a fresh device too.
          const int64_t all = driver::last.dynamic_bytes + driver::last.static_bytes;
          if (alone && (all < 46 * 1024 || all > 50 * 1024)) return;
          near += alone;
          const int device = driver::current = alone ? fresh++ : 0;
          try {
            launch(shape, Launch{nullptr, device, 0});
            if (served && *served < vocab) *served = vocab;
          } catch (const std::exception& error) {
            const std::string said = error.what();
            if (served && vocab > promised[served - longest]) return;  // the binding refuses it
            if (++failures < 20)
              std::printf("%lld rows of %lld: %s\n", static_cast<long long>(rows), static_cast<long long>(vocab),
                          said.c_str());
            return;
          }
        }
      };
      const auto search_rows = [&](const Shape& shape, const Launch& where) {
        cuda::launch_rows<search>(shape, rows, where, &out);
      };
      const auto hold_rows = [&](const Shape& shape, const Launch& where) {
        cuda::launch_rows<hold>(shape, rows, where, &out);
      };
      run(cuda::resident_shape(rows, vocab, 0), search_rows, &longest[0]);
      run(cuda::unfiltered_shape(rows, vocab, 0), search_rows, &longest[1]);
      run(cuda::segments_shape(rows, vocab, 0), search_rows, nullptr);
      run(cuda::stream_shape(rows, vocab, 0), hold_rows, nullptr);
      if (cuda::fits_cluster_smem(rows, vocab, 0)) run(cuda::cluster_smem_shape(vocab), hold_rows, nullptr);
    }
  }
  std::printf("%d near the limit, %d failures, longest rows %lld filtered %lld plain\n", near, failures,
              static_cast<long long>(longest[0]), static_cast<long long>(longest[1]));
  return failures != 0;
}
