// What is found out once for each device: its properties, attributes of kernels, how many blocks it holds.
#pragma once

#include <cuda_runtime.h>

#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include <flashinfer/cuda/host/check.cuh>

namespace flashinfer::cuda {

template <typename T>
class PerDevice {
 public:
  // Returns what find(device) returned the first time, and runs it with the device current: attributes of a kernel are
  // set for the current device alone. A call that throws does not count.
  template <typename Find>
  const T& get(int device, const Find& find) {
    if (device < 0 || device >= kMaxDevices)
      throw std::runtime_error("device: got " + std::to_string(device) + ", wanted 0 to " +
                               std::to_string(kMaxDevices - 1));
    std::call_once(once_[device], [&] { look(device, find); });
    return found_[device];
  }

 private:
  static constexpr int kMaxDevices = 64;

  template <typename Find>
  void look(int device, const Find& find) {
    int current;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (current == device) {
      found_[device] = find(device);
      return;
    }
    // On a thread of its own nothing is to be put back: cudaSetDevice(current) would make a context on a GPU that the
    // process may never use.
    std::exception_ptr error;
    std::thread([&] {
      try {
        check(cudaSetDevice(device), "cudaSetDevice");
        found_[device] = find(device);
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
  }

  T found_[kMaxDevices] = {};
  std::once_flag once_[kMaxDevices];
};

}  // namespace flashinfer::cuda
