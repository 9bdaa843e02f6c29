// The registers of the compiled CPU level, and vectors as wide as one of them.
//
// Arithmetic uses the vector extensions of GCC and Clang. Intrinsics appear only for instructions that these
// cannot express or do not compile well, in the file named after the instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define FLASHINFER_AVX512 1
#elif defined(__AVX2__) && defined(__F16C__)
#define FLASHINFER_AVX2 1
#elif defined(__aarch64__)
#define FLASHINFER_NEON 1
#else
#define FLASHINFER_PORTABLE 1
#endif

// Marks a loop without dependences between iterations. Clang finds them itself if pointers are __restrict.
#if defined(__clang__)
#define FLASHINFER_INDEPENDENT
#else
#define FLASHINFER_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace flashinfer::cpu {

// Elements of a vector, and the number of vector registers.
#if defined(FLASHINFER_AVX512)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(FLASHINFER_AVX2)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(FLASHINFER_NEON)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float vfloat __attribute__((vector_size(4 * kLanes)));
typedef int32_t vint __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vuint __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vushort __attribute__((vector_size(2 * kLanes)));

// Half as many doubles as a vfloat has floats: one register.
constexpr int kWideLanes = kLanes / 2;
typedef double vdouble __attribute__((vector_size(8 * kWideLanes)));
typedef int64_t vlong __attribute__((vector_size(8 * kWideLanes)));
typedef uint64_t vulong __attribute__((vector_size(8 * kWideLanes)));

// A vfloat's values as doubles.
struct Wide {
  vdouble low, high;
};

// 2 * kLanes elements in an order of the type: the same in every load_two and store_two of that type.
struct Two {
  vfloat first, second;
};

template <typename V, typename P>
inline V load_raw(const P* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps every bit: the two types must have one size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline vfloat splat(float value) { return vfloat{} + value; }

// Return elements kLane... of the concatenation of a and b.
template <int... kLane>
inline vfloat shuffle(vfloat a, vfloat b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kLane...);
#else
  return __builtin_shuffle(a, b, vint{kLane...});
#endif
}

}  // namespace flashinfer::cpu
