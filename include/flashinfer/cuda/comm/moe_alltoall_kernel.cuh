// All-to-all of experts on CUDA; definitions in common/moe_alltoall.h.
//
// The kernels that move rows never wait for peers. Between two of them, a kernel of one CTA sends headers and
// waits for those of the peers. Rows are complete before its fence, because the kernel that moved them has
// ended. The next kernel sees what the CTA acquired, because the CTA has ended. So grids may exceed what the
// GPU holds, and ranks that share a GPU need one resident CTA each. The kernel of one CTA does not let the
// next one start early: CTAs of the next would hold the GPU while this rank waits, and other ranks on this
// GPU could not send.
#pragma once

#include <flashinfer/common/moe_alltoall.h>
#include <flashinfer/cuda/comm/call.cuh>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>

namespace flashinfer::cuda {

constexpr int kAllToAllThreads = 256;
constexpr int kAllToAllCtas = 8;  // of a grid per SM, at most

// Copy a row to the ranks whose bits are set in `ranks`, from the next rank on, in accesses of a Unit.
// place(rank) is the destination. All threads of a CTA call it.
template <typename Unit, typename PlaceOf>
__device__ __forceinline__ void copy_units(const CommGroup& group, uint32_t ranks, const void* from, int64_t bytes,
                                           const PlaceOf& place) {
  const int count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Unit)));
  for (int first = threadIdx.x; first < count; first += kLoadsInFlight * blockDim.x) {
    Unit values[kLoadsInFlight];
    const auto for_units = [&](const auto& use) {
#pragma unroll
      for (int j = 0; j < kLoadsInFlight; ++j)
        if (const int i = first + j * static_cast<int>(blockDim.x); i < count) use(i, values[j]);
    };
    for_units([&](int i, Unit& value) { value = static_cast<const Unit*>(from)[i]; });
    for (int distance = 1; distance <= group.ranks; ++distance) {
      const int rank =
          group.rank + distance < group.ranks ? group.rank + distance : group.rank + distance - group.ranks;
      if (!(ranks >> rank & 1)) continue;
      Unit* to = reinterpret_cast<Unit*>(place(rank));
      for_units([&](int i, const Unit& value) { to[i] = value; });
    }
  }
}
template <typename PlaceOf>
__device__ __forceinline__ void copy_row(const CommGroup& group, uint32_t ranks, const void* from, int64_t bytes,
                                         const PlaceOf& place) {
  switch (access_bytes(reinterpret_cast<uint64_t>(from) | bytes)) {
    case 16: return copy_units<uint4>(group, ranks, from, bytes, place);
    case 8: return copy_units<uint2>(group, ranks, from, bytes, place);
    case 4: return copy_units<uint32_t>(group, ranks, from, bytes, place);
    case 2: return copy_units<uint16_t>(group, ranks, from, bytes, place);
    default: return copy_units<uint8_t>(group, ranks, from, bytes, place);
  }
}

static __global__ void __launch_bounds__(kAllToAllThreads, 3)
    moe_dispatch_kernel(const __grid_constant__ MoeDispatchParams p) {
  const CommGroup& group = p.call.group;
  const int64_t most = p.call.rows;
  wait_for_inputs();
  launch_dependents();
  if (earlier_failure(p.call)) return;
  for (int64_t token = blockIdx.x; token < most; token += gridDim.x) {
    uint32_t ranks = 0;
    for (int k = 0; token < p.tokens && k < p.top_k; ++k) {
      const int target = next_target(p, token, k, ranks);
      if (threadIdx.x == 0) p.targets[token * p.top_k + k] = target;
    }
    const int64_t row = group.rank * most + token;
    if (threadIdx.x < group.ranks)
      reinterpret_cast<int32_t*>(region_of(group, threadIdx.x))[row] = ranks >> threadIdx.x & 1;
    for (int i = 0; i < p.count; ++i) {
      const MoePayload& payload = p.payloads[i];
      const auto place = [&](int rank) { return region_of(group, rank) + payload.offset + row * payload.row_bytes; };
      if (ranks != 0)
        copy_row(group, ranks, static_cast<const uint8_t*>(payload.rows) + token * payload.row_bytes, payload.row_bytes,
                 place);
      for (int rank = 0; i == p.ids && rank < group.ranks; ++rank)
        for (int64_t k = threadIdx.x; !(ranks >> rank & 1) && k < payload.row_bytes / 4; k += blockDim.x)
          reinterpret_cast<int32_t*>(place(rank))[k] = p.invalid_id;
    }
  }
}

// End a call: send this rank's headers and wait for those of all ranks.
static __global__ void __launch_bounds__(kCommThreads) moe_meet_kernel(const __grid_constant__ KernelParams p) {
  wait_for_inputs();
  const uint32_t epoch = call_number(p);
  const Failure failure = earlier_failure(p);
  send_headers(p, p.group.ranks, epoch, failure == 0);
  end_call<true>(p, p.group.ranks, epoch, failure);
}

static __global__ void __launch_bounds__(kAllToAllThreads, 3)
    moe_return_kernel(const __grid_constant__ MoeCombineParams p) {
  const CommGroup& group = p.call.group;
  const int64_t most = p.call.rows, bytes = p.call.row_bytes;
  wait_for_inputs();
  launch_dependents();
  if (earlier_failure(p.call)) return;
  const auto* sent = reinterpret_cast<const int32_t*>(region_of(group, group.rank));
  for (int64_t row = blockIdx.x; row < group.ranks * most; row += gridDim.x) {
    if (!sent[row]) continue;
    const int owner = static_cast<int>(row / most);
    const int64_t place = p.offset + (group.rank * most + row % most) * bytes;
    copy_row(group, 1u << owner, static_cast<const uint8_t*>(p.call.input) + row * bytes, bytes,
             [&](int rank) { return region_of(group, rank) + place; });
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kAllToAllThreads) moe_sum_kernel(const __grid_constant__ MoeCombineParams p) {
  constexpr int kN = kPartElements<T>;
  const int64_t n = p.call.hidden;
  const uint32_t row_parts = static_cast<uint32_t>((n + kN - 1) / kN);
  wait_for_inputs();
  launch_dependents();
  const float start = earlier_failure(p.call) ? __uint_as_float(kEmpty) : 0.0f;  // NaN after a failure
  const uint8_t* area = region_of(p.call.group, p.call.group.rank) + p.offset;
  const auto part_index = [&](int64_t row, uint32_t part) {
    const auto at = static_cast<uint32_t>(row);
    return PartIndex{at, part, at * row_parts + part};
  };
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    for (uint32_t part = threadIdx.x; part < row_parts; part += blockDim.x) {
      float sum[kN], values[kN];
#pragma unroll
      for (int j = 0; j < kN; ++j) sum[j] = start;
      for (int k = 0; k < p.top_k; ++k) {
        const int32_t target = p.targets[token * p.top_k + k];
        if (target < 0) continue;
        load_part<kAligned, T>(area, part_index(target * p.call.rows + token, part), n).to_floats(values);
#pragma unroll
        for (int j = 0; j < kN; ++j) sum[j] += values[j];
      }
      store_part<kAligned, T>(p.call.out, part_index(token, part), n, Part<T>::from_floats(sum));
    }
  }
}

inline void launch_rows(void (*kernel)(MoeCombineParams), int64_t rows, const MoeCombineParams& p,
                        const Launch& where) {
  const int64_t most = int64_t{device_info(where.device).num_sms} * kAllToAllCtas;
  launch(kernel, dim3(static_cast<unsigned>(rows < most ? rows : most)), dim3(kAllToAllThreads), where, p);
}

inline void meet(const AllReduceParams& call, const Launch& where) {
  launch(moe_meet_kernel, dim3(1), dim3(kCommThreads), where, with_addresses(call));
}

inline void moe_dispatch(const MoeDispatchParams& p, const Launch& where) {
  const int64_t most = int64_t{device_info(where.device).num_sms} * kAllToAllCtas;
  launch(moe_dispatch_kernel, dim3(static_cast<unsigned>(p.call.rows < most ? p.call.rows : most)),
         dim3(kAllToAllThreads), where, p);
  meet(p.call, where);
}

template <typename T>
void moe_combine(const MoeCombineParams& p, const Launch& where) {
  launch_rows(moe_return_kernel, p.call.group.ranks * p.call.rows, p, where);
  meet(p.call, where);
  const bool is_aligned = (reinterpret_cast<uintptr_t>(p.call.out) | p.call.row_bytes) % kPartBytes == 0;
  launch_rows(is_aligned ? moe_sum_kernel<T, true> : moe_sum_kernel<T, false>, p.tokens, p, where);
}

inline void load_moe_kernels() {
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, moe_dispatch_kernel), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, moe_meet_kernel), "cudaFuncGetAttributes");
  check(cudaFuncGetAttributes(&attributes, moe_return_kernel), "cudaFuncGetAttributes");
}
template <typename T>
void load_moe_sums() {
  cudaFuncAttributes attributes{};
  for (auto* kernel : {moe_sum_kernel<T, true>, moe_sum_kernel<T, false>})
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

}  // namespace flashinfer::cuda
