#pragma once
#include "machine.h"
namespace flashinfer::cuda::ptx {
enum class WgmmaType { kBF16, kF16, kE4M3, kE5M2, kE4M3E5M2 };
template <int kN> struct Wgmma {
  template <WgmmaType kType, bool kTransB, bool kTransA = false>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    emu::issue({d, kN, accumulate, false, kType == WgmmaType::kBF16, kTransA, kTransB, a, b, {}});
  }
  template <WgmmaType kType, bool kTransB>
  static void rs(float (&d)[kN / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, bool accumulate) {
    emu::issue({d, kN, accumulate, true, kType == WgmmaType::kBF16, false, kTransB, 0, b, {a0, a1, a2, a3}});
  }
};
}
