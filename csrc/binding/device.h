// The backend that a binding is compiled for, and the device and stream of a call.
#pragma once

#if FLASHINFER_CUDA
#include <torch/csrc/stable/accelerator.h>
#endif

#include <optional>

#include <flashinfer/common/launch.h>

#include "binding/view.h"

#if FLASHINFER_CUDA
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#define FLASHINFER_DISPATCH_KEY CUDA
constexpr bool kOnCuda = true;
#else
#define FLASHINFER_DISPATCH_KEY CPU
constexpr bool kOnCuda = false;
#endif

namespace flashinfer::binding {

// Make the device of an operator's tensors current for its lifetime, and hold the stream to launch on.
class OnDevice {
 public:
  explicit OnDevice(const View& arg, std::optional<bool> enable_pdl = std::nullopt)
      : launch_{nullptr, arg.device, enable_pdl ? *enable_pdl : -1} {
#if FLASHINFER_CUDA
    int32_t current;
    require(aoti_torch_get_current_device_index(&current), "the current device");
    if (current != arg.device) guard_.emplace(arg.device);
    require(aoti_torch_get_current_cuda_stream(arg.device, &launch_.stream), "the current stream");
#endif
  }

  operator const Launch&() const { return launch_; }

 private:
  Launch launch_;
#if FLASHINFER_CUDA
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#endif
};

}  // namespace flashinfer::binding
