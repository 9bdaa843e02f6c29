#include "driver.h"

#include <iostream>
#include <mutex>
#include <utility>

namespace driver {

Model model{9, 0, 132, 232448};
thread_local int current = 0;
std::map<std::string, int> statics;
std::function<void(int)> before_set;
std::function<void(const Taken&)> on_launch;
Taken last;
int launches = 0;

static std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> found;  // kernels are registered before main
  return found;
}
static std::map<std::pair<const void*, int>, int> attributes;
static std::mutex mutex;

void read_statics() {
  std::string kernel;
  for (int bytes; std::cin >> kernel >> bytes;) statics[kernel] = bytes;
}

static int static_bytes_of(const void* kernel) {
  const auto found = statics.find(names().at(kernel));
  return found == statics.end() ? 0 : found->second;
}

}  // namespace driver

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = driver::current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return driver::current = device, cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorInvalidValue ? "invalid argument" : "?"; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  const driver::Model& is = driver::model;
  *value = name == cudaDevAttrComputeCapabilityMajor             ? is.major
           : name == cudaDevAttrComputeCapabilityMinor           ? is.minor
           : name == cudaDevAttrMultiProcessorCount              ? is.num_sms
           : name == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? is.shared_bytes
           : name == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? is.shared_bytes + 1024
           : name == cudaDevAttrReservedSharedMemoryPerBlock     ? 1024
                                                                 : 0;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const std::lock_guard<std::mutex> guard(driver::mutex);
  *attributes = {};
  attributes->sharedSizeBytes = driver::static_bytes_of(kernel);
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute name, int value) {
  if (name != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (driver::before_set) driver::before_set(value);
  const std::lock_guard<std::mutex> guard(driver::mutex);
  if (value + driver::static_bytes_of(kernel) > driver::model.shared_bytes) return cudaErrorInvalidValue;
  driver::attributes[{kernel, driver::current}] = value;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  const std::lock_guard<std::mutex> guard(driver::mutex);
  const int dynamic = static_cast<int>(config->dynamicSmemBytes), own = driver::static_bytes_of(kernel);
  driver::last = {driver::names().at(kernel), config->gridDim, dynamic, own};
  ++driver::launches;
  if (driver::on_launch) driver::on_launch(driver::last);
  const auto found = driver::attributes.find({kernel, driver::current});
  const int granted = found == driver::attributes.end() ? 0 : found->second;
  const dim3& grid = config->gridDim;
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    return cudaErrorInvalidValue;
  return dynamic + own > 48 * 1024 && dynamic > granted ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr, *result = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// Registration by which nvcc's host code names its kernels.
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  driver::names()[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorInvalidValue; }
}
