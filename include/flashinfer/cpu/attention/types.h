// Element types and shapes of an instance of the attention kernels, and the memory of a worker.
#pragma once

#include <cstdint>
#include <new>

#include <flashinfer/attention/params.h>
#include <flashinfer/cpu/simd/gemm.h>

namespace flashinfer::cpu {

// Element types and shapes of an instance.
template <typename Q, typename KV, typename O, int kHeadDimQK, int kHeadDimVO, PosEncodingMode kPosEncoding>
struct AttentionTypes {
  using DTypeQ = Q;
  using DTypeKV = KV;
  using DTypeO = O;
  static constexpr int HEAD_DIM_QK = kHeadDimQK, HEAD_DIM_VO = kHeadDimVO;
  static constexpr PosEncodingMode POS_ENCODING = kPosEncoding;
  static constexpr bool kRope = kPosEncoding == PosEncodingMode::kRopeLlama;
  // Strides of rows of queries and of O, in whole vectors.
  static constexpr int kQueryStride = round_up(kHeadDimQK, kLanes), kSumStride = round_up(kHeadDimVO, kLanes);
};

// Uninitialised memory of one worker, aligned to cache lines.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : floats_(static_cast<float*>(::operator new(sizeof(float) * floats, std::align_val_t(64)))), next_(floats_) {}
  ~Scratch() { ::operator delete(floats_, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* take(int64_t floats) {
    float* result = next_;
    next_ += floats;
    return result;
  }

 private:
  float *floats_, *next_;
};

}  // namespace flashinfer::cpu
