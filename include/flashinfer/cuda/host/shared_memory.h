// Device memory that processes share: allocations of the driver that travel as file descriptors, and those of
// cudaMalloc, which travel as handles of 64 bytes. The runtime finds the driver's functions: nothing links
// libcuda.
//
// A descriptor's memory lives until the last mapping and handle of any process are gone, so the death of one
// process unmaps nothing of another. Memory of cudaIpc has no such promise: it serves where descriptors
// cannot be passed on.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include <flashinfer/cuda/host/check.cuh>

namespace flashinfer::cuda {

template <typename Function>
Function driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr)
    throw std::runtime_error(std::string("this driver has no ") + name + ", wanted one of CUDA 12 or later");
  return reinterpret_cast<Function>(found);
}

// Call a function of the driver by name, and throw on an error.
#define FLASHINFER_DRIVER(function, ...)                                                                            \
  do {                                                                                                              \
    static const auto call = ::flashinfer::cuda::driver_function<decltype(&function)>(#function);                   \
    const CUresult error = call(__VA_ARGS__);                                                                       \
    if (error != CUDA_SUCCESS) throw std::runtime_error(std::string(#function ": error ") + std::to_string(error)); \
  } while (false)

inline CUmemAllocationProp shareable(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

// Return the unit of sizes of shareable allocations.
inline int64_t shared_granularity(int device) {
  const CUmemAllocationProp prop = shareable(device);
  size_t unit = 0;
  FLASHINFER_DRIVER(cuMemGetAllocationGranularity, &unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  return static_cast<int64_t>(unit);
}

// Map an allocation for reads and writes of `device`, and release its handle: the mapping keeps the memory.
inline int64_t map_shared(CUmemGenericAllocationHandle handle, int64_t bytes, int device) {
  CUdeviceptr address = 0;
  bool is_mapped = false;
  try {
    FLASHINFER_DRIVER(cuMemAddressReserve, &address, bytes, 0, 0, 0);
    FLASHINFER_DRIVER(cuMemMap, address, bytes, 0, handle, 0);
    is_mapped = true;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    FLASHINFER_DRIVER(cuMemSetAccess, address, bytes, &access, 1);
    FLASHINFER_DRIVER(cuMemRelease, handle);
  } catch (...) {
    if (is_mapped) FLASHINFER_DRIVER(cuMemUnmap, address, bytes);
    if (address != 0) FLASHINFER_DRIVER(cuMemAddressFree, address, bytes);
    FLASHINFER_DRIVER(cuMemRelease, handle);
    throw;
  }
  return static_cast<int64_t>(address);
}

// Allocates and maps memory of `device`. `descriptor` receives a file descriptor that the caller closes.
inline int64_t create_shared(int device, int64_t bytes, int* descriptor) {
  const CUmemAllocationProp prop = shareable(device);
  CUmemGenericAllocationHandle handle = 0;
  FLASHINFER_DRIVER(cuMemCreate, &handle, bytes, &prop, 0);
  try {
    FLASHINFER_DRIVER(cuMemExportToShareableHandle, descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  } catch (...) {
    FLASHINFER_DRIVER(cuMemRelease, handle);
    throw;
  }
  return map_shared(handle, bytes, device);
}

inline int64_t open_shared(int device, int64_t bytes, int descriptor) {
  CUmemGenericAllocationHandle handle = 0;
  FLASHINFER_DRIVER(cuMemImportFromShareableHandle, &handle,
                    reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),  // the driver takes the number itself
                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return map_shared(handle, bytes, device);
}

inline void unmap_shared(int64_t address, int64_t bytes) {
  FLASHINFER_DRIVER(cuMemUnmap, static_cast<CUdeviceptr>(address), bytes);
  FLASHINFER_DRIVER(cuMemAddressFree, static_cast<CUdeviceptr>(address), bytes);
}

#undef FLASHINFER_DRIVER

}  // namespace flashinfer::cuda
