// Values that the host finds once per device: properties, limits of kernels, numbers of resident CTAs.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include <flashinfer/cuda/host/check.cuh>

namespace flashinfer::cuda {

// Runs work() with the device current: attributes of a kernel belong to the current device.
template <typename Work>
void on_device(int device, const Work& work) {
  int current;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return work();
  // A separate thread has no device to restore. cudaSetDevice(current) would create a context on a GPU that
  // the process may never use.
  std::exception_ptr error;
  std::thread([&] {
    try {
      check(cudaSetDevice(device), "cudaSetDevice");
      work();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
}

// One T per device of any number, value-initialised. References stay valid. Any thread may call at().
template <typename T>
class DeviceTable {
 public:
  T& at(int device) {
    if (device < 0) throw std::runtime_error("device: got " + std::to_string(device) + ", wanted 0 or more");
    Block* block = &first_;
    for (; device >= kDevices; device -= kDevices) block = next_of(block);
    return block->values[device];
  }

 private:
  static constexpr int kDevices = 16;
  struct Block {
    T values[kDevices]{};
    std::atomic<Block*> next{nullptr};
  };

  static Block* next_of(Block* block) {
    Block* found = block->next.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    auto* fresh = new Block;
    if (block->next.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;
    return found;
  }

  Block first_;
};

template <typename T>
class PerDevice {
 public:
  // Return the result of the first find(device) that did not throw. The device is current while find runs.
  template <typename Find>
  const T& get(int device, const Find& find) {
    Once& once = table_.at(device);
    std::call_once(once.flag, [&] { on_device(device, [&] { once.value = find(device); }); });
    return once.value;
  }

 private:
  struct Once {
    std::once_flag flag;
    T value{};
  };
  DeviceTable<Once> table_;
};

}  // namespace flashinfer::cuda
