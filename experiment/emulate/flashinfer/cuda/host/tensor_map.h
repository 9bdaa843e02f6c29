#pragma once
#include <flashinfer/cuda/ptx/tma.cuh>
namespace flashinfer::cuda {
template <typename T> int map_type() { return 0; }
struct MapShape { const void* data; uint64_t sizes[3]; int64_t strides[3]; uint32_t box[3]; };
template <int kWidth, int kRank> CUtensorMap tensor_map(int, int64_t, const MapShape& s) {
  CUtensorMap m{};
  m.data = static_cast<const uint8_t*>(s.data);
  for (int i = 0; i < 3; ++i) m.sizes[i] = s.sizes[i], m.strides[i] = s.strides[i], m.box[i] = s.box[i];
  return m;
}
}
