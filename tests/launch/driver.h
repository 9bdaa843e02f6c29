// A CUDA runtime without a GPU, for programs that are linked with -cudart=none: devices are numbers, kernels are names.
//
// It keeps the driver's rule for shared memory: a launch fails with "invalid argument" if its static and dynamic bytes
// together pass 48 KiB and the kernel's attribute on that device is less than the dynamic bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace driver {

struct Model {
  int major, minor, num_sms, shared_bytes;
};
struct Taken {
  std::string kernel;
  dim3 grid;
  int64_t dynamic_bytes, static_bytes;
};

extern Model model;                          // of every device
extern thread_local int current;             // device
extern std::map<std::string, int> statics;   // bytes of static shared memory by a kernel's name
extern std::function<void(int)> before_set;  // called with the bytes of an attribute before it is set
extern std::function<void(const Taken&)> on_launch;
extern Taken last;
extern int launches;

// Reads lines of a kernel's name and its static bytes, which ptxas printed.
void read_statics();

}  // namespace driver
