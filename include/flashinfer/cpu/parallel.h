// Parallel loops on torch's own pool and thread count, through two functions of its stable C ABI.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size,
                                      void (*body)(int64_t begin, int64_t end, void* context), void* context);
extern "C" int32_t torch_get_num_threads(uint32_t* num_threads);

namespace flashinfer::cpu {

// A thread is worth starting for about this many bytes.
constexpr int64_t kGrainBytes = 32 * 1024;

// A loop's body and the first exception of a worker. Exceptions cannot pass torch's C functions.
template <typename Body>
class GuardedBody {
 public:
  explicit GuardedBody(const Body& body) : body_(body) {}

  static void call(int64_t begin, int64_t end, void* context) {
    auto& guarded = *static_cast<GuardedBody*>(context);
    try {
      guarded.body_(begin, end);
    } catch (...) {
      const std::lock_guard<std::mutex> guard(guarded.mutex_);
      if (!guarded.error_) guarded.error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const Body& body_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Call body(first, last) on disjoint ranges that cover [0, count), each but one with at least `grain` items.
// Throw the first exception of a body after all have ended.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  GuardedBody<Body> guarded(body);
  if (torch_parallel_for(0, count, grain < 1 ? 1 : grain, GuardedBody<Body>::call, &guarded) != 0)
    throw std::runtime_error("torch_parallel_for failed");
  guarded.rethrow();
}

// Run parallel_for over rows that access `bytes` bytes each.
template <typename Body>
void parallel_rows(int64_t rows, int64_t bytes, const Body& body) {
  parallel_for(rows, bytes < 1 ? rows : kGrainBytes / bytes, body);
}

inline int32_t num_threads() {
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads) != 0) throw std::runtime_error("torch_get_num_threads failed");
  return threads < 1 ? 1 : static_cast<int32_t>(threads);
}

// Call work(next, worker) on each thread, for tasks of any size. next() returns the next free task of [0,
// count), or count after the last. Worker indices are below num_threads().
template <typename Work>
void parallel_workers(int64_t count, const Work& work) {
  std::atomic<int64_t> taken{0};
  const int64_t threads = num_threads();
  parallel_for(count < threads ? count : threads, 1, [&](int64_t worker, int64_t) {
    const auto next = [&] {
      const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
      return task < count ? task : count;
    };
    work(next, worker);
  });
}

// Variant with work(next).
template <typename Work>
void parallel_tasks(int64_t count, const Work& work) {
  parallel_workers(count, [&](const auto& next, int64_t) { work(next); });
}

}  // namespace flashinfer::cpu
