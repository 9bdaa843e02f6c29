// Stream, device and mode of a launch. CPU kernels ignore it; cuda/host/launch.cuh reads it.
#pragma once

namespace flashinfer {

struct Launch {
  void* stream;  // cudaStream_t
  int device;    // index of the CUDA device
  int pdl;       // programmatic dependent launch: 1 yes, 0 no, -1 if the device supports it
};

}  // namespace flashinfer
