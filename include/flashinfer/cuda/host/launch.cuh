// Launches of kernels: on the caller's stream, checked, with programmatic dependent launch on request.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include <flashinfer/common/launch.h>
#include <flashinfer/cuda/host/check.cuh>
#include <flashinfer/cuda/host/per_device.cuh>

namespace flashinfer::cuda {

constexpr unsigned kMaxGridY = 65535;  // and z

inline int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

struct DeviceInfo {
  int major, minor, num_sms, shared_bytes;  // shared_bytes: the maximum of static and dynamic bytes of a CTA
};

// Query once per device: a query costs as much as a launch.
inline const DeviceInfo& device_info(int device) {
  static PerDevice<DeviceInfo> infos;
  return infos.get(device, [](int index) {
    return DeviceInfo{
        attribute(cudaDevAttrComputeCapabilityMajor, index), attribute(cudaDevAttrComputeCapabilityMinor, index),
        attribute(cudaDevAttrMultiProcessorCount, index), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)};
  });
}

// Launch kernel(args...) on the caller's stream, in clusters of `cluster` CTAs along x. An empty grid
// launches nothing. With PDL the kernel may start while the kernel before it ends, and must call
// wait_for_inputs() before it reads memory. Kernels with dynamic shared memory go through Kernel
// (kernel.cuh), which requests it first.
template <typename... Params, typename... Args>
void launch_with(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t dynamic_bytes, unsigned cluster,
                 const Launch& where, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (grid.x > 0x7fffffffu || grid.y > kMaxGridY || grid.z > kMaxGridY)
    throw std::runtime_error("kernel launch: got a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
                             " x " + std::to_string(grid.z) + ", wanted at most 2147483647 x 65535 x 65535");
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (where.pdl != 0 && device_info(where.device).major >= 9) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(dynamic_bytes);
  config.stream = static_cast<cudaStream_t>(where.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...), "kernel launch");
}

// Launch a kernel without dynamic shared memory.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, const Launch& where, Args&&... args) {
  launch_with(kernel, grid, block, 0, 1, where, std::forward<Args>(args)...);
}

// Wait until writes of the kernel before this one are visible. Without PDL, return at once.
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allow the next kernel to be scheduled. It waits for this kernel's end before it reads memory.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashinfer::cuda
