// The only host path to a kernel with dynamic shared memory, and the only test for code of 9.0a.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include <flashinfer/common/launch.h>
#include <flashinfer/cuda/host/check.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/host/per_device.cuh>

namespace flashinfer::cuda {

// Static and dynamic bytes of shared memory that a kernel may have without an attribute.
constexpr int64_t kFreeSharedBytes = 48 << 10;

// Host side of one kernel.
template <auto kFunction>
struct Kernel {
  // Allow launches with this many bytes of dynamic shared memory. The driver's limit without an attribute
  // also counts static bytes. The attribute only grows, so that no call revokes what another thread's launch
  // needs.
  static void prepare(int device, int64_t dynamic_bytes) {
    static DeviceTable<Limit> limits;
    Limit& limit = limits.at(device);
    if (dynamic_bytes <= limit.bytes.load(std::memory_order_acquire)) return;
    const std::lock_guard<std::mutex> guard(limit.mutex);
    if (dynamic_bytes <= limit.bytes.load(std::memory_order_relaxed)) return;
    on_device(device, [&] {
      cudaFuncAttributes attributes{};
      check(cudaFuncGetAttributes(&attributes, kFunction), "cudaFuncGetAttributes");
      const auto static_bytes = static_cast<int64_t>(attributes.sharedSizeBytes);
      const int64_t max_dynamic_bytes = device_info(device).shared_bytes - static_bytes,
                    free = kFreeSharedBytes - static_bytes;
      if (dynamic_bytes > max_dynamic_bytes)
        throw std::runtime_error("kernel launch: got " + std::to_string(dynamic_bytes) +
                                 " bytes of dynamic shared memory, wanted at most " +
                                 std::to_string(max_dynamic_bytes) + " on this GPU");
      if (dynamic_bytes > free)
        check(cudaFuncSetAttribute(kFunction, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(dynamic_bytes)),
              "cudaFuncSetAttribute");
      limit.bytes.store(std::max(dynamic_bytes, free), std::memory_order_release);
    });
  }

  // Prefers shared memory over L1 cache for the kernel. The device must be current.
  static void prefer_shared_memory() {
    check(
        cudaFuncSetAttribute(kFunction, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  }

  // Return the number of CTAs that the whole device holds at one time. The device must be current. Costs more
  // than a launch.
  static int resident_ctas(int device, int threads, int64_t dynamic_bytes) {
    prepare(device, dynamic_bytes);
    int ctas = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kFunction, threads, static_cast<size_t>(dynamic_bytes)),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return ctas * device_info(device).num_sms;
  }

  template <typename... Args>
  static void launch(dim3 grid, dim3 block, int64_t dynamic_bytes, unsigned cluster, const Launch& where,
                     Args&&... args) {
    prepare(where.device, dynamic_bytes);
    launch_with(kFunction, grid, block, dynamic_bytes, cluster, where, std::forward<Args>(args)...);
  }

  template <typename... Args>
  static void launch(dim3 grid, dim3 block, int64_t dynamic_bytes, const Launch& where, Args&&... args) {
    launch(grid, block, dynamic_bytes, 1u, where, std::forward<Args>(args)...);
  }

 private:
  struct Limit {
    std::mutex mutex;
    std::atomic<int64_t> bytes{-1};  // -1: not queried yet
  };
};

// A kernel with shared memory only if compiled for 9.0a.
template <int = 0>
__global__ void sm90a_marker_kernel([[maybe_unused]] int* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  volatile __shared__ int word;
  word = 1;
  *out = word;
#endif
}

// Return true if the device has compute capability 9.0 and this module has code for 9.0a. Code for 9.0 runs
// there too, but kernels that need 9.0a are empty in it. A template, so that only callers get the marker.
template <int = 0>
bool serves_sm90a(int device) {
  static PerDevice<bool> found;
  return found.get(device, [](int which) {
    const DeviceInfo& info = device_info(which);
    if (info.major != 9 || info.minor != 0) return false;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, sm90a_marker_kernel<>), "cudaFuncGetAttributes");
    return attributes.sharedSizeBytes > 0;
  });
}

}  // namespace flashinfer::cuda
