// Rotary embedding of queries and keys inside attention: elements i and i + kDim / 2 are a pair.
//
// The angle of position p is that of its block of kSteps positions plus that of p mod kSteps, so a key costs
// no sine. The angles of kSteps positions are computed once, those of a block's first position once per
// block. The addition theorems give the sums.
#pragma once

#include <cmath>
#include <memory>

#include <flashinfer/cpu/simd/math.h>

namespace flashinfer::cpu {

template <int kDim>
class Rotation {
 public:
  static constexpr int kPairs = kDim / 2, kSteps = 32;
  static_assert(kDim % 8 == 0, "a head is whole groups of pairs");

  // Cosines and sines of one position.
  struct alignas(64) Angles {
    float cos[(kPairs + kLanes - 1) / kLanes * kLanes], sin[(kPairs + kLanes - 1) / kLanes * kLanes];
  };

  // rcp_scale and rcp_theta are those of AttentionParams.
  Rotation(double rcp_scale, double rcp_theta) : steps_(new Angles[kSteps]) {
    for (int i = 0; i < kPairs; ++i)
      quarters_[i] = rcp_scale * std::pow(rcp_theta, 2.0 * i / kDim) * 0.6366197723675814;  // 2 / pi
    for (int step = 0; step < kSteps; ++step) steps_[step] = angles(step);
  }

  Angles angles(int32_t position) const {
    Angles result;
    const double where = position;
    for (int i = 0; i < kPairs; i += kLanes) {
      const SinCos both = sincos_quarters(
          {load_raw<vdouble>(quarters_ + i) * where, load_raw<vdouble>(quarters_ + i + kWideLanes) * where});
      store(result.cos + i, both.cos);
      store(result.sin + i, both.sin);
    }
    return result;
  }

  void rotate(float* x, const Angles& by) const {
    for_lanes<kPairs>([&](int i, int count) { rotate_pairs(x + i, count, load(by.cos + i), load(by.sin + i)); });
  }

  // Rotate by the angle of a block's first position and `step` more, 0 <= step < kSteps.
  void rotate(float* x, const Angles& block, int step) const {
    for_lanes<kPairs>([&](int i, int count) {
      const vfloat c = load(block.cos + i), s = load(block.sin + i);
      const vfloat step_c = load(steps_[step].cos + i), step_s = load(steps_[step].sin + i);
      rotate_pairs(x + i, count, c * step_c - s * step_s, s * step_c + c * step_s);
    });
  }

 private:
  static void rotate_pairs(float* x, int count, vfloat cos, vfloat sin) {
    const vfloat a = load(x, count), b = load(x + kPairs, count);
    store(x, a * cos - b * sin, count);
    store(x + kPairs, b * cos + a * sin, count);
  }

  double quarters_[(kPairs + kLanes - 1) / kLanes * kLanes] = {};
  std::unique_ptr<Angles[]> steps_;
};

}  // namespace flashinfer::cpu
