// Where and how a kernel is launched. CPU kernels ignore it; CUDA kernels read it in cuda/launch.cuh.
#pragma once

namespace flashinfer {

struct Launch {
  void* stream;  // cudaStream_t
  int device;    // index of the CUDA device
  int pdl;       // programmatic dependent launch: 1 yes, 0 no, -1 where the device has it
};

}  // namespace flashinfer
