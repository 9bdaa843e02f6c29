// Products of a warpgroup on the tensor cores: d += a * b, or d = a * b if `accumulate` is false.
//
// d has 64 rows and N columns. d[i] of lane 4 g + q of warp w has row 16 w + g + 8 (i / 2 % 2) and column 8
// (i / 4) + 2 q + i % 2. b is in smem. a is in smem (ss), or in registers (rs) in the layout of mma.m16n8k16.
// Descriptors name operands in smem, see cuda/tile/descriptor.cuh. A product has 32 bytes of k: 16 elements
// of 16 bits, or 32 of 8 bits.
//
// Asynchronous: warpgroup_fence(), products, warpgroup_commit(), warpgroup_wait(). Registers must not be
// touched until then.
#pragma once

#include <cstdint>

#include <flashinfer/common/dtype.h>

namespace flashinfer::cuda::ptx {

// kE4M3E5M2: a is e4m3, b is e5m2.
enum class WgmmaType { kBF16, kF16, kE4M3, kE5M2, kE4M3E5M2 };
// The type of products whose operands both have type T.
template <typename T>
constexpr WgmmaType kWgmmaType = __is_same(T, bfloat16_t)   ? WgmmaType::kBF16
                                 : __is_same(T, fp8_e4m3_t) ? WgmmaType::kE4M3
                                 : __is_same(T, fp8_e5m2_t) ? WgmmaType::kE5M2
                                                            : WgmmaType::kF16;
template <WgmmaType kType>
constexpr bool kHas16Bits = kType == WgmmaType::kBF16 || kType == WgmmaType::kF16;

// kTransB: rows of b are k, and N is contiguous. kTransA: rows of a are k, and M is contiguous. Neither for 8
// bits.
template <int kN>
struct Wgmma;

// Lists of 8 registers, as text of the instruction and as operands.
#define R0_ "%0, %1, %2, %3, %4, %5, %6, %7"
#define R8_ ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R16_ ", %16, %17, %18, %19, %20, %21, %22, %23"
#define R24_ ", %24, %25, %26, %27, %28, %29, %30, %31"
#define R32_ ", %32, %33, %34, %35, %36, %37, %38, %39"
#define R40_ ", %40, %41, %42, %43, %44, %45, %46, %47"
#define R48_ ", %48, %49, %50, %51, %52, %53, %54, %55"
#define R56_ ", %56, %57, %58, %59, %60, %61, %62, %63"
#define R64_ ", %64, %65, %66, %67, %68, %69, %70, %71"
#define R72_ ", %72, %73, %74, %75, %76, %77, %78, %79"
#define R80_ ", %80, %81, %82, %83, %84, %85, %86, %87"
#define R88_ ", %88, %89, %90, %91, %92, %93, %94, %95"
#define R96_ ", %96, %97, %98, %99, %100, %101, %102, %103"
#define R104_ ", %104, %105, %106, %107, %108, %109, %110, %111"
#define R112_ ", %112, %113, %114, %115, %116, %117, %118, %119"
#define R120_ ", %120, %121, %122, %123, %124, %125, %126, %127"
#define T8_ R0_
#define T16_ T8_ R8_
#define T24_ T16_ R16_
#define T32_ T24_ R24_
#define T40_ T32_ R32_
#define T48_ T40_ R40_
#define T64_ T48_ R48_ R56_
#define T80_ T64_ R64_ R72_
#define T96_ T80_ R80_ R88_
#define T112_ T96_ R96_ R104_
#define T128_ T96_ R96_ R104_ R112_ R120_
#define D4_(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8_(i) D4_(i), D4_(i + 4)
#define D16_(i) D8_(i), D8_(i + 8)
#define D24_(i) D16_(i), D8_(i + 16)
#define D32_(i) D16_(i), D16_(i + 16)
#define D40_(i) D32_(i), D8_(i + 32)
#define D48_(i) D32_(i), D16_(i + 32)
#define D64_(i) D32_(i), D32_(i + 32)
#define D80_(i) D64_(i), D16_(i + 64)
#define D96_(i) D64_(i), D32_(i + 64)
#define D112_(i) D96_(i), D16_(i + 96)
#define D128_(i) D64_(i), D64_(i + 64)

// n1 ... n6: the number of registers, and the operand numbers after them.
#define SS_(n, r, types, trans, n0, n1, n2, ...)                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types \
               " {" T##r##_ "}, %" #n0 ", %" #n1 ", p, 1, 1" trans ";\n}"                                  \
               : D##r##_(0)                                                                                \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))__VA_ARGS__)
#define RS_(n, r, types, trans, n0, n1, n2, n3, n4, n5, ...)                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #n5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types \
               " {" T##r##_ "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1" trans ";\n}"  \
               : D##r##_(0)                                                                                \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int>(accumulate))__VA_ARGS__)
#define COMMA_ ,
#define WGMMA_(n, r, n1, n2, n3, n4, n5, n6)                                                                     \
  template <>                                                                                                    \
  struct Wgmma<n> {                                                                                              \
    template <WgmmaType kType, bool kTransB, bool kTransA = false>                                               \
    __device__ __forceinline__ static void ss(float (&d)[r], uint64_t a, uint64_t b, bool accumulate) {          \
      static_assert(kHas16Bits<kType> || !(kTransA || kTransB), "8-bit operands have k contiguous");             \
      if constexpr (kType == WgmmaType::kBF16) {                                                                 \
        SS_(n, r, "k16.f32.bf16.bf16", ", %" #n4 ", %" #n3, r, n1, n2,                                           \
            COMMA_ "n"(static_cast<int>(kTransB))COMMA_ "n"(static_cast<int>(kTransA)));                         \
      } else if constexpr (kType == WgmmaType::kF16) {                                                           \
        SS_(n, r, "k16.f32.f16.f16", ", %" #n4 ", %" #n3, r, n1, n2,                                             \
            COMMA_ "n"(static_cast<int>(kTransB))COMMA_ "n"(static_cast<int>(kTransA)));                         \
      } else if constexpr (kType == WgmmaType::kE4M3) {                                                          \
        SS_(n, r, "k32.f32.e4m3.e4m3", "", r, n1, n2);                                                           \
      } else if constexpr (kType == WgmmaType::kE5M2) {                                                          \
        SS_(n, r, "k32.f32.e5m2.e5m2", "", r, n1, n2);                                                           \
      } else {                                                                                                   \
        SS_(n, r, "k32.f32.e4m3.e5m2", "", r, n1, n2);                                                           \
      }                                                                                                          \
    }                                                                                                            \
    template <WgmmaType kType, bool kTransB>                                                                     \
    __device__ __forceinline__ static void rs(float (&d)[r], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                              uint64_t b, bool accumulate) {                                     \
      static_assert(kHas16Bits<kType> || !kTransB, "8-bit operands have k contiguous");                          \
      if constexpr (kType == WgmmaType::kBF16) {                                                                 \
        RS_(n, r, "k16.f32.bf16.bf16", ", %" #n6, r, n1, n2, n3, n4, n5, COMMA_ "n"(static_cast<int>(kTransB))); \
      } else if constexpr (kType == WgmmaType::kF16) {                                                           \
        RS_(n, r, "k16.f32.f16.f16", ", %" #n6, r, n1, n2, n3, n4, n5, COMMA_ "n"(static_cast<int>(kTransB)));   \
      } else if constexpr (kType == WgmmaType::kE4M3) {                                                          \
        RS_(n, r, "k32.f32.e4m3.e4m3", "", r, n1, n2, n3, n4, n5);                                               \
      } else if constexpr (kType == WgmmaType::kE5M2) {                                                          \
        RS_(n, r, "k32.f32.e5m2.e5m2", "", r, n1, n2, n3, n4, n5);                                               \
      } else {                                                                                                   \
        RS_(n, r, "k32.f32.e4m3.e5m2", "", r, n1, n2, n3, n4, n5);                                               \
      }                                                                                                          \
    }                                                                                                            \
  };
WGMMA_(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA_(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA_(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA_(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA_(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA_(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA_(256, 128, 129, 130, 131, 132, 133, 134)
#undef WGMMA_
#undef R0_
#undef R8_
#undef R16_
#undef R24_
#undef R32_
#undef R40_
#undef R48_
#undef R56_
#undef R64_
#undef R72_
#undef R80_
#undef R88_
#undef R96_
#undef R104_
#undef R112_
#undef R120_
#undef T8_
#undef T16_
#undef T24_
#undef T32_
#undef T40_
#undef T48_
#undef T64_
#undef T80_
#undef T96_
#undef T112_
#undef T128_
#undef D4_
#undef D8_
#undef D16_
#undef D24_
#undef D32_
#undef D40_
#undef D48_
#undef D64_
#undef D80_
#undef D96_
#undef D112_
#undef D128_
#undef SS_
#undef RS_
#undef COMMA_

}  // namespace flashinfer::cuda::ptx
