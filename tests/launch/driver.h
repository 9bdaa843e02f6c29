// CUDA runtime without a GPU, for programs linked with -cudart=none: devices are numbers, kernels are names.
//
// It enforces the driver's rule for shared memory. A launch fails with "invalid argument" if its static and
// dynamic bytes together exceed 48 KiB and the kernel's attribute on that device does not cover the dynamic
// bytes.
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
extern thread_local int current;             // current device
extern std::map<std::string, int> statics;   // bytes of static shared memory by a kernel's name
extern std::function<void(int)> before_set;  // called with the bytes of an attribute before it is set
extern std::function<void(const Taken&)> on_launch;
extern Taken last;
extern int launches;

// Read lines with a kernel's name and its static bytes, as ptxas printed them.
void read_statics();

}  // namespace driver
