// A kernel that packs numbers as e4m3, for test_e4m3.py.
#include <flashinfer/cuda/tile/convert.cuh>

__global__ void pack_four(const float* in, unsigned* out) {
  *out = flashinfer::cuda::pack_e4m3(in[0], in[1], in[2], in[3]);
}
