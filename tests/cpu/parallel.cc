// Throws in workers of torch's own pool, for test_parallel.py.
#include <flashinfer/cpu/parallel.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>

int main() {
  std::atomic<int64_t> done{0};
  try {
    flashinfer::cpu::parallel_for(1000, 1, [&](int64_t first, int64_t last) {
      done += last - first;
      throw std::runtime_error("row: got too many, wanted fewer");
    });
    return 1;
  } catch (const std::runtime_error& error) {
    std::printf("%s\n", error.what());
  }
  try {
    flashinfer::cpu::parallel_tasks(8, [](const auto&) { throw std::bad_alloc(); });
  } catch (const std::bad_alloc&) {
    std::printf("bad_alloc\n");
  }
  int64_t sum = 0;
  flashinfer::cpu::parallel_for(10, 100, [&](int64_t first, int64_t last) { sum += last - first; });
  return sum == 10 && done > 0 ? 0 : 1;
}
