// Collectives between GPUs for the element types of this module, and the memory that its ranks share.
#include <cstdio>
#include <cstring>

#include <flashinfer/cuda/host/shared_memory.h>
#include <flashinfer/cuda/comm/allreduce.cuh>
#include <flashinfer/cuda/comm/moe_alltoall_kernel.cuh>

#include "allreduce_config.h"

namespace flashinfer {

void allreduce(const AllReduceParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::allreduce<T>(params, where))
}

void reduce_scatter(const AllReduceParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::reduce_scatter<T>(params, where))
}

void all_gather(const AllReduceParams& params, const Launch& where) {
  DISPATCH_dtype(params.dtype, T, cuda::all_gather<T>(params, where))
}

void moe_dispatch(const MoeDispatchParams& params, const Launch& where) { cuda::moe_dispatch(params, where); }

void moe_combine(const MoeCombineParams& params, const Launch& where) {
  DISPATCH_dtype(params.call.dtype, T, cuda::moe_combine<T>(params, where))
}

static void load_kernels(int ranks) {
  cuda::load_moe_kernels();
  for (const auto& row : kDtype)
    DISPATCH_dtype(std::get<0>(row), T, (cuda::load_kernels<T>(ranks), cuda::load_moe_sums<T>()))
}

}  // namespace flashinfer

// Functions that flashinfer/comm/_memory.py calls with their device current. Each returns 0, or an error in
// `text`.
namespace {

constexpr int kTextBytes = 256;

template <typename Work>
int guarded(char* text, const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    cudaGetLastError();  // a refused call must not fail the next launch
    std::snprintf(text, kTextBytes, "%s", error.what());
    return 1;
  }
}

}  // namespace

#define FLASHINFER_EXPORT extern "C" __attribute__((visibility("default"))) int
using flashinfer::cuda::check;

FLASHINFER_EXPORT comm_granularity(char* text, int device, int64_t* bytes) {
  return guarded(text, [&] {
    check(cudaFree(nullptr), "cudaFree");  // the driver's calls need the device's context
    *bytes = flashinfer::cuda::shared_granularity(device);
  });
}
FLASHINFER_EXPORT comm_create(char* text, int device, int64_t bytes, int* descriptor, int64_t* address) {
  return guarded(text, [&] { *address = flashinfer::cuda::create_shared(device, bytes, descriptor); });
}
FLASHINFER_EXPORT comm_open(char* text, int device, int64_t bytes, int descriptor, int64_t* address) {
  return guarded(text, [&] { *address = flashinfer::cuda::open_shared(device, bytes, descriptor); });
}
FLASHINFER_EXPORT comm_unmap(char* text, int64_t address, int64_t bytes) {
  return guarded(text, [&] { flashinfer::cuda::unmap_shared(address, bytes); });
}
FLASHINFER_EXPORT comm_ipc_create(char* text, int64_t bytes, char* handle, int64_t* address) {
  return guarded(text, [&] {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    cudaIpcMemHandle_t made;
    const cudaError_t error = cudaIpcGetMemHandle(&made, memory);
    if (error != cudaSuccess) cudaFree(memory);
    check(error, "cudaIpcGetMemHandle");
    std::memcpy(handle, &made, sizeof(made));
    *address = reinterpret_cast<int64_t>(memory);
  });
}
FLASHINFER_EXPORT comm_ipc_open(char* text, const char* handle, int64_t* address) {
  return guarded(text, [&] {
    cudaIpcMemHandle_t given;
    std::memcpy(&given, handle, sizeof(given));
    void* memory = nullptr;
    check(cudaIpcOpenMemHandle(&memory, given, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    *address = reinterpret_cast<int64_t>(memory);
  });
}
FLASHINFER_EXPORT comm_ipc_close(char* text, int64_t address) {
  return guarded(text,
                 [&] { check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(address)), "cudaIpcCloseMemHandle"); });
}
FLASHINFER_EXPORT comm_free(char* text, int64_t address) {
  return guarded(text, [&] { check(cudaFree(reinterpret_cast<void*>(address)), "cudaFree"); });
}
// Fill memory with empty words.
FLASHINFER_EXPORT comm_clear(char* text, int64_t address, int64_t bytes) {
  return guarded(text, [&] {
    check(cudaMemset(reinterpret_cast<void*>(address), 0xff, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}
FLASHINFER_EXPORT comm_write(char* text, int64_t address, const void* from, int64_t bytes) {
  return guarded(text, [&] {
    check(cudaMemcpy(reinterpret_cast<void*>(address), from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  });
}
FLASHINFER_EXPORT comm_read(char* text, int64_t address, void* to, int64_t bytes) {
  return guarded(text, [&] {
    check(cudaMemcpy(to, reinterpret_cast<void*>(address), bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  });
}
FLASHINFER_EXPORT comm_load_kernels(char* text, int ranks) {
  return guarded(text, [&] { flashinfer::load_kernels(ranks); });
}
