// Rotary embedding with 8-bit results on CUDA; equations in common/rope_quant.h.
//
// A head of 2 h elements is h / kN units: kN elements at i kN, and kN more at h + i kN. So a unit of either
// layout holds whole pairs: (low[j], high[j]), or neighbours of low and of high if interleaved. threadIdx.y
// and blockIdx.x count tokens. The units of all heads of a token are one range, which threads and blockIdx.y
// share. Heads that are unaligned or do not split into units are written element by element.
#pragma once

#include <flashinfer/common/fast_div.h>
#include <flashinfer/common/rope_quant.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/quantize.cuh>
#include <flashinfer/cuda/tile/vec.cuh>

namespace flashinfer::cuda {

constexpr int kRopeQuantThreads = 128;
constexpr int kUnitsPerThread = 2;  // four independent 16-byte loads in flight

// Units of each part: the first one in a token's range, and their number in a head.
struct QuantUnits {
  uint32_t first[kMaxQuantHeads + 1];
  FastDiv in_head[kMaxQuantHeads];
};

// Place of a unit in a token.
struct QuantUnit {
  int part;
  uint32_t head, at;  // of its head
};

__device__ __forceinline__ QuantUnit find_unit(const RopeQuantParams& p, const QuantUnits& units, uint32_t unit) {
  QuantUnit found{0, 0, 0};
  while (found.part + 1 < p.count && unit >= units.first[found.part + 1]) ++found.part;
  units.in_head[found.part].divmod(unit - units.first[found.part], found.head, found.at);
  return found;
}

// Position of a token in the cache of angles and in the paged cache.
struct QuantToken {
  const float* angles;  // null: no rotation
  Slot slot;

  __device__ __forceinline__ QuantToken(const RopeQuantParams& p, int64_t token) {
    const int64_t position = p.pos_ids[token];
    angles = position >= 0 && position < p.cache_size ? p.cos_sin_cache + position * p.cache_stride : nullptr;
    slot = p.pages.batch_indices ? find_slot(p.pages, token) : Slot{-1, 0};
  }

  // Return the output of a head, or null without a slot.
  __device__ __forceinline__ uint8_t* output(const QuantHeads& part, int64_t token, uint32_t head) const {
    if (part.paged && slot.page < 0) return nullptr;
    const int64_t at = part.paged ? slot.page * part.page_stride + slot.entry * part.output_token_stride
                                  : token * part.output_token_stride;
    return part.output + at + head * part.output_head_stride;
  }
};

template <typename T>
__device__ __forceinline__ const T* input_of(const QuantHeads& part, int64_t token, uint32_t head) {
  return static_cast<const T*>(part.input) + token * part.input_token_stride + head * part.input_head_stride;
}

template <int kN>
__device__ __forceinline__ void load_angles(const float* from, float (&to)[kN]) {
  constexpr int kAtOnce = kN < 4 ? kN : 4;
#pragma unroll
  for (int i = 0; i < kN; i += kAtOnce) {
    const auto some = load_vec<float, kAtOnce>(from + i);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) to[i + j] = some.at[j];
  }
}

template <typename T>
__device__ __forceinline__ void rotate_rounded(float& a, float& b, float cos, float sin) {
  const float turned = a * cos - b * sin;
  b = b * cos + a * sin, a = turned;
  round_pair<T>(a, b);
}

template <typename T, int kN>
__device__ __forceinline__ void rotate_unit(const RopeQuantParams& p, const float* angles, uint32_t at,
                                            float (&low)[kN], float (&high)[kN]) {
  const int pairs = p.rotary_dim / 2;
  if (p.interleave) {
    float cos[kN / 2], sin[kN / 2];
    const auto rotate = [&](float (&x)[kN], const float* from) {
      load_angles(from, cos), load_angles(from + pairs, sin);
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) rotate_rounded<T>(x[2 * j], x[2 * j + 1], cos[j], sin[j]);
    };
    rotate(low, angles + at * (kN / 2));
    rotate(high, angles + pairs / 2 + at * (kN / 2));
  } else {
    float cos[kN], sin[kN];
    load_angles(angles + at * kN, cos), load_angles(angles + pairs + at * kN, sin);
#pragma unroll
    for (int j = 0; j < kN; ++j) rotate_rounded<T>(low[j], high[j], cos[j], sin[j]);
  }
}

template <int kN>
__device__ __forceinline__ void store_scaled(uint8_t* to, const float (&x)[kN], float scale, DType dtype) {
  float scaled[kN];
#pragma unroll
  for (int j = 0; j < kN; ++j) scaled[j] = x[j] * scale;
  store_vec(to, quantize(scaled, dtype));
}

template <typename T, int kN>
__global__ void __launch_bounds__(kRopeQuantThreads)
    rope_quant_kernel(const __grid_constant__ RopeQuantParams p, const __grid_constant__ QuantUnits units) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const uint32_t total = units.first[p.count], tile = blockDim.x * kUnitsPerThread;
  wait_for_inputs();
  launch_dependents();
  if (token >= p.num_tokens) return;
  for (uint32_t start = blockIdx.y * tile; start < total; start += gridDim.y * tile) {
    QuantUnit unit[kUnitsPerThread];
    Vec<T, kN> low[kUnitsPerThread], high[kUnitsPerThread];
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      const uint32_t index = start + threadIdx.x + i * blockDim.x;
      if (index >= total) continue;
      unit[i] = find_unit(p, units, index);
      const QuantHeads& part = p.parts[unit[i].part];
      const T* in = input_of<T>(part, token, unit[i].head) + unit[i].at * kN;
      low[i] = load_vec<T, kN>(in), high[i] = load_vec<T, kN>(in + part.dim / 2);
    }
    const QuantToken of_token(p, token);  // its loads overlap those of the units
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      if (start + threadIdx.x + i * blockDim.x >= total) continue;
      const QuantHeads& part = p.parts[unit[i].part];
      uint8_t* out = of_token.output(part, token, unit[i].head);
      if (!out) continue;
      float x[kN], y[kN];
      low[i].to_floats(x), high[i].to_floats(y);
      if (part.rotates && of_token.angles) rotate_unit<T>(p, of_token.angles, unit[i].at, x, y);
      const float scale = part.scale.get_float();
      store_scaled(out + unit[i].at * kN, x, scale, p.output_dtype);
      store_scaled(out + part.dim / 2 + unit[i].at * kN, y, scale, p.output_dtype);
    }
  }
}

// A unit is one element.
template <typename T>
__global__ void __launch_bounds__(kRopeQuantThreads)
    rope_quant_any_kernel(const __grid_constant__ RopeQuantParams p, const __grid_constant__ QuantUnits units) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int pairs = p.rotary_dim / 2;
  wait_for_inputs();
  launch_dependents();
  if (token >= p.num_tokens) return;
  const QuantToken of_token(p, token);
  for (uint32_t index = blockIdx.y * blockDim.x + threadIdx.x; index < units.first[p.count];
       index += gridDim.y * blockDim.x) {
    const QuantUnit unit = find_unit(p, units, index);
    const QuantHeads& part = p.parts[unit.part];
    uint8_t* out = of_token.output(part, token, unit.head);
    if (!out) continue;
    const T* in = input_of<T>(part, token, unit.head);
    const int at = unit.at;
    float x = to_float(in[at]);
    if (part.rotates && of_token.angles) {
      const bool second = p.interleave ? at & 1 : at >= pairs;
      const int pair = p.interleave ? at / 2 : second ? at - pairs : at;
      const float other = to_float(in[p.interleave ? at ^ 1 : second ? at - pairs : at + pairs]);
      const float cos = of_token.angles[pair], sin = of_token.angles[pairs + pair];
      x = to_float(from_float<T>(x * cos + (second ? sin : -sin) * other));
    }
    const float scaled[1] = {x * part.scale.get_float()};
    out[at] = quantize(scaled, p.output_dtype).at[0];
  }
}

// Return true if every head splits into units of kN elements that are aligned on both sides.
template <typename T, int kN>
bool fits_units(const RopeQuantParams& p) {
  bool fits = fits_vectors<float>({p.cos_sin_cache}, p.cache_stride);
  for (int i = 0; i < p.count; ++i) {
    const QuantHeads& part = p.parts[i];
    const auto out = static_cast<int64_t>(reinterpret_cast<uintptr_t>(part.output)) | part.output_token_stride |
                     part.output_head_stride | part.page_stride;
    fits = fits && part.dim % (2 * kN) == 0 && out % kN == 0 &&
           fits_vectors<T>({part.input}, part.input_token_stride, part.input_head_stride);
  }
  return fits;
}

template <typename T>
void rope_quant(const RopeQuantParams& p, const Launch& where) {
  constexpr int kN = kVecBytes / sizeof(T);
  const bool fits = fits_units<T, kN>(p);
  const int64_t unit = fits ? 2 * kN : 1, per_thread = fits ? kUnitsPerThread : 1;
  QuantUnits units{};
  for (int i = 0; i < p.count; ++i) {
    const auto in_head = static_cast<uint32_t>(p.parts[i].dim / unit);
    units.first[i + 1] = units.first[i] + in_head * static_cast<uint32_t>(p.parts[i].heads);
    units.in_head[i] = FastDiv(in_head);
  }
  const int64_t threads = (units.first[p.count] + per_thread - 1) / per_thread;
  const int64_t splits = (threads + kRopeQuantThreads - 1) / kRopeQuantThreads;
  const int64_t across = (threads + splits - 1) / splits, tokens = kRopeQuantThreads / across;
  const dim3 block(across, tokens), grid((p.num_tokens + tokens - 1) / tokens, splits < 65535 ? splits : 65535);
  launch(fits ? rope_quant_kernel<T, kN> : rope_quant_any_kernel<T>, grid, block, where, p, units);
}

}  // namespace flashinfer::cuda
