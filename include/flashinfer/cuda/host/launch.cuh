// Launching a kernel: on the given stream, checked, with programmatic dependent launch where it is wanted.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include <flashinfer/common/launch.h>
#include <flashinfer/cuda/host/check.cuh>
#include <flashinfer/cuda/host/per_device.cuh>

namespace flashinfer::cuda {

inline int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

struct DeviceInfo {
  int major, num_sms, shared_bytes;  // that a block may ask for
};

// Found once: an attribute call costs as much as a launch.
inline const DeviceInfo& device_info(int device) {
  static PerDevice<DeviceInfo> infos;
  return infos.get(device, [](int index) {
    return DeviceInfo{attribute(cudaDevAttrComputeCapabilityMajor, index),
                      attribute(cudaDevAttrMultiProcessorCount, index),
                      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index)};
  });
}

// Launches kernel(args...) in clusters of `cluster` blocks. With PDL the kernel may start while the one before it ends;
// it must call wait_for_inputs() before it touches memory.
template <typename... Params, typename... Args>
void launch_clusters(void (*kernel)(Params...), unsigned cluster, dim3 grid, dim3 block, size_t smem_bytes,
                     const Launch& where, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
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
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(where.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...), "kernel launch");
}

// The same of blocks that know nothing of each other.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, const Launch& where, Args&&... args) {
  launch_clusters(kernel, 1, grid, block, smem_bytes, where, std::forward<Args>(args)...);
}

// Waits until the memory written by the kernel before this one can be read (nothing to do without PDL).
__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel be scheduled; it waits for this one's end before it reads memory.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashinfer::cuda
