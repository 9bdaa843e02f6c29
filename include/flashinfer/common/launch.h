// Stream, device and mode of a launch. CPU kernels ignore them; CUDA kernels read them in cuda/host/launch.cuh.
#pragma once

namespace flashinfer {

struct Launch {
  void* stream;  // cudaStream_t
  int device;    // index of the CUDA device
  int pdl;       // programmatic dependent launch: 1 yes, 0 no, -1 where the device has it
};

}  // namespace flashinfer
