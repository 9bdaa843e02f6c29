// A step of the delta rule on Hopper, for states of 128 x 128 and at least some of them for each processor. A block
// goes from head to head. States come to shared memory and leave it by bulk copies: a thread for each place of a ring
// starts the next state's copy when the one before has left, so that what is on its way does not depend on who
// computes.
#pragma once

#include <flashinfer/cuda/delta_step.cuh>
#include <flashinfer/cuda/ptx/named_barrier.cuh>
#include <flashinfer/cuda/ptx/shared.cuh>
#include <flashinfer/cuda/ptx/tma.cuh>
#include <flashinfer/cuda/ptx/warpgroup.cuh>
#include <flashinfer/cuda/tile/ring.cuh>

namespace flashinfer::cuda {

// Groups of threads compute, each a head at a time.
struct StepRing {
  static constexpr int kSize = 128, kThreads = 256, kWarps = kThreads / 32, kGroups = 2, kPlaces = 4;
  static constexpr int kAllThreads = kGroups * kThreads + 32 * kPlaces, kVectors = kSize * kSize / 4 / kThreads;
  static constexpr int kMoverRegisters = 32, kWorkerRegisters = 112;
  static constexpr int kBytes = 3 * 4 * kSize * kSize;  // of places
};

template <bool kRowGate>
struct StepRingGroup {
  float q[StepRing::kSize], k[StepRing::kSize], v[StepRing::kSize], beta[StepRing::kSize], u[StepRing::kSize],
      o[StepRing::kSize];
  float decay[kRowGate ? StepRing::kSize : 4];
  float scale;
  alignas(16) float of_k[StepRing::kWarps][StepRing::kSize];
  float of_q[StepRing::kWarps][StepRing::kSize], kq[StepRing::kWarps];
};

// Where the states of a sequence's head are, among all slots' heads; negative: nowhere.
struct StepSlots {
  int64_t from, to;

  __device__ __forceinline__ StepSlots(const DeltaRuleParams& p, int64_t sequence, int64_t value_head) {
    const int64_t slot = p.slots.data ? p.slots[sequence] : sequence;
    const int64_t to_slot = p.output_slots.data ? p.output_slots[sequence] : slot;
    const bool there = slot >= 0 && slot < p.num_slots;
    from = there ? slot * p.in.num_value_heads + value_head : -1;
    to = there && p.final_state && to_slot >= 0 && to_slot < p.num_slots ? to_slot * p.in.num_value_heads + value_head
                                                                         : -1;
  }
};

template <typename T, bool kRowGate, bool kVFirst>
struct StepRingWorker {
  using Group = StepRingGroup<kRowGate>;
  static constexpr int kSize = StepRing::kSize, kVectors = StepRing::kVectors, kWarps = StepRing::kWarps;

  const DeltaRuleParams& p;
  const DeltaRuleInputs& in;
  Group& shared;
  const int group = threadIdx.x / StepRing::kThreads, thread = threadIdx.x % StepRing::kThreads;
  const int warp = thread / 32, lane = thread % 32;
  const int members;                                 // value heads of a head of q and k
  float key = 0, value = 0, gate = 0, row_gate = 0;  // what this thread brings of a token
  float at[kVectors][4];                             // of the state: lines warp, warp + kWarps, ..., four of each

  __device__ __forceinline__ StepRingWorker(const DeltaRuleParams& params, Group& memory)
      : p(params),
        in(params.in),
        shared(memory),
        members(static_cast<int>(in.num_value_heads) / static_cast<int>(in.num_heads)) {}

  __device__ __forceinline__ void meet() const { ptx::named_barrier<StepRing::kThreads>(1 + group); }

  __device__ __forceinline__ void fetch(int sequence, int value_head) {
    const int d = thread % kSize;
    const int head = value_head / members;
    const int64_t one = sequence * in.num_value_heads + value_head;
    if (thread < kSize) {
      key = load_float<T>(in.q, in.q_strides.at(sequence, 0, head) + d);
      value = load_float<T>(in.v, in.v_strides.at(sequence, 0, value_head) + d);
    } else {
      key = load_float<T>(in.k, in.k_strides.at(sequence, 0, head) + d);
      value = in.beta ? load_float<float>(in.beta, in.beta_is_vector ? one * kSize + d : one) : 1.f;
    }
    gate = in.g ? load_float<float>(in.g, one) : 0.f;
    if (kRowGate && thread < kSize) row_gate = load_float<float>(in.gk, one * kSize + d);
  }
  __device__ __forceinline__ void put(int value_head) const {
    const StepGate raw(p, value_head);
    const int d = thread % kSize;
    (thread < kSize ? shared.q : shared.k)[d] = key;
    if (thread < kSize) {
      shared.v[d] = value;
    } else {
      shared.beta[d] = in.beta ? raw.beta(value) : value;
    }
    if (thread < (kRowGate ? kSize : 1)) shared.decay[d] = __expf((in.g ? raw.gate(gate) : 0.f) + row_gate);
    meet();
    if (!in.l2norm) return;
    if (warp < 2) {
      float4& four = reinterpret_cast<float4*>(warp == 0 ? shared.q : shared.k)[lane];
      const float4 x = four;
      const float factor = rsqrtf(lanes_sum<32>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w) + 1e-6f);
      four = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    }
    meet();
  }

  template <typename S>
  __device__ __forceinline__ void take(const unsigned char* place) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      load_vec<S, 4>(reinterpret_cast<const S*>(place) + (j * kWarps + warp) * kSize + 4 * lane).to_floats(at[j]);
      if (j % 4 == 3) asm volatile("" ::: "memory");  // no more at a time: registers are for the state
    }
  }
  template <typename S>
  __device__ __forceinline__ void give(unsigned char* place) const {
    using Raw = typename RawVec<4 * sizeof(S)>::Type;  // store_vec() is for global memory
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const auto four = Vec<S, 4>::from_floats(at[j]);
      Raw raw;
      memcpy(&raw, &four, sizeof(raw));
      reinterpret_cast<Raw*>(place)[(j * kWarps + warp) * (kSize / 4) + lane] = raw;
      if (j % 4 == 3) asm volatile("" ::: "memory");
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) at[j][0] = at[j][1] = at[j][2] = at[j][3] = 0.f;
  }

  __device__ __forceinline__ float decay(int row) const { return shared.decay[kRowGate ? row : 0]; }
  __device__ __forceinline__ float4 four(const float* of) const { return reinterpret_cast<const float4*>(of)[lane]; }

  __device__ __forceinline__ void update(T* to) {
    if constexpr (kVFirst) {
      const float4 keys4 = four(shared.k), queries4 = four(shared.q);
      const float keys[4] = {keys4.x, keys4.y, keys4.z, keys4.w};
      const float queries[4] = {queries4.x, queries4.y, queries4.z, queries4.w};
      float decays[kRowGate ? 4 : 1], kq = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (kRowGate || c == 0) decays[c] = decay(4 * lane + c);
        kq = fmaf(keys[c], queries[c], kq);
      }
      kq = lanes_sum<32>(kq);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float of_k = 0, of_q = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          at[j][c] *= decays[kRowGate ? c : 0];
          of_k = fmaf(at[j][c], keys[c], of_k), of_q = fmaf(at[j][c], queries[c], of_q);
        }
        of_k = lanes_sum<32>(of_k), of_q = lanes_sum<32>(of_q);
        const int column = j * kWarps + warp;
        const float u = shared.beta[column] * (shared.v[column] - of_k);
#pragma unroll
        for (int c = 0; c < 4; ++c) at[j][c] = fmaf(keys[c], u, at[j][c]);
        if (lane == 0) shared.o[column] = fmaf(u, kq, of_q);
        if (j % 2 == 1) asm volatile("" ::: "memory");
      }
      meet();
      if (thread < kSize) to[thread] = from_float<T>(shared.scale * shared.o[thread]);
    } else {
      float4 of_k = make_float4(0.f, 0.f, 0.f, 0.f), of_q = of_k;
      float kq = 0;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int row = j * kWarps + warp;
        const float key = shared.k[row], query = shared.q[row], factor = decay(row);
        kq = fmaf(key, query, kq);
#pragma unroll
        for (int c = 0; c < 4; ++c) at[j][c] *= factor;
        of_k.x = fmaf(at[j][0], key, of_k.x), of_k.y = fmaf(at[j][1], key, of_k.y);
        of_k.z = fmaf(at[j][2], key, of_k.z), of_k.w = fmaf(at[j][3], key, of_k.w);
        of_q.x = fmaf(at[j][0], query, of_q.x), of_q.y = fmaf(at[j][1], query, of_q.y);
        of_q.z = fmaf(at[j][2], query, of_q.z), of_q.w = fmaf(at[j][3], query, of_q.w);
      }
      reinterpret_cast<float4*>(shared.of_k[warp])[lane] = of_k;
      reinterpret_cast<float4*>(shared.of_q[warp])[lane] = of_q;
      if (lane == 0) shared.kq[warp] = kq;
      meet();
      const int column = thread % kSize;
      const auto& parts = thread < kSize ? shared.of_k : shared.of_q;
      float total = 0;
      kq = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += parts[w][column], kq += shared.kq[w];
      if (thread < kSize) shared.u[column] = shared.beta[column] * (shared.v[column] - total);
      meet();
      if (thread >= kSize) to[column] = from_float<T>(shared.scale * fmaf(shared.u[column], kq, total));
      const float4 u = four(shared.u);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float key = shared.k[j * kWarps + warp];
        at[j][0] = fmaf(key, u.x, at[j][0]), at[j][1] = fmaf(key, u.y, at[j][1]);
        at[j][2] = fmaf(key, u.z, at[j][2]), at[j][3] = fmaf(key, u.w, at[j][3]);
      }
    }
  }
};

template <typename T, bool kRowGate, bool kVFirst>
__global__ void __launch_bounds__(StepRing::kAllThreads, 1)
    delta_step_ring_kernel(const DeltaRuleParams p, int state_bytes, int places) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) unsigned char memory[];
  using Worker = StepRingWorker<T, kRowGate, kVFirst>;
  __shared__ __align__(16) StepRingGroup<kRowGate> groups[StepRing::kGroups];
  __shared__ uint64_t barriers[2 * StepRing::kPlaces];  // a state is there, and it has been changed
  __shared__ bool wanted[StepRing::kPlaces];            // a head has a slot
  const DeltaRuleInputs& in = p.in;
  const auto full = [&](int i) { return ptx::shared_address(&barriers[i]); };
  const auto done = [&](int i) { return ptx::shared_address(&barriers[StepRing::kPlaces + i]); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < places; ++i) ptx::mbarrier_init(full(i), 1), ptx::mbarrier_init(done(i), 1);
    ptx::mbarrier_fence_init();
  }
  __syncthreads();
  wait_for_inputs();
  const int value_heads = static_cast<int>(in.num_value_heads),
            heads = static_cast<int>(in.num_sequences) * value_heads;
  if (threadIdx.x >= StepRing::kGroups * StepRing::kThreads) {
    const int place = (threadIdx.x - StepRing::kGroups * StepRing::kThreads) / 32;
    ptx::setmaxnreg_dec<StepRing::kMoverRegisters>();
    if (threadIdx.x % 32 != 0 || place >= places) return;
    const uint32_t here = ptx::shared_address(memory) + place * state_bytes;
    uint32_t parity = 0;
    for (int head = blockIdx.x + place * gridDim.x; head < heads; head += places * gridDim.x, parity ^= 1) {
      const StepSlots slots(p, head / value_heads, head % value_heads);
      wanted[place] = slots.from >= 0;
      if (slots.from >= 0 && p.initial_state) {
        ptx::mbarrier_arrive_expect_tx(full(place), state_bytes);
        ptx::bulk_load(here, static_cast<const char*>(p.initial_state) + slots.from * state_bytes, state_bytes,
                       full(place));
      } else {
        ptx::mbarrier_arrive(full(place));
      }
      ptx::mbarrier_wait(done(place), parity);
      if (slots.to >= 0) {
        ptx::bulk_store(static_cast<char*>(p.final_state) + slots.to * state_bytes, here, state_bytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
    }
    ptx::bulk_wait<0>();
    return;
  }
  ptx::setmaxnreg_inc<StepRing::kWorkerRegisters>();
  Worker worker(p, groups[threadIdx.x / StepRing::kThreads]);
  if (worker.thread == 0) worker.shared.scale = static_cast<float>(in.scale.get());
  int place = worker.group % places;
  uint32_t parity = (worker.group / places) & 1;
  int head = blockIdx.x + worker.group * gridDim.x;
  if (head < heads) worker.fetch(head / value_heads, head % value_heads);
  for (; head < heads; head += StepRing::kGroups * gridDim.x) {
    worker.put(head % value_heads);
    const int next = head + StepRing::kGroups * gridDim.x;
    if (next < heads) worker.fetch(next / value_heads, next % value_heads);
    unsigned char* const at = memory + place * state_bytes;
    const auto o = [&] { return static_cast<T*>(p.o) + static_cast<int64_t>(head) * StepRing::kSize; };
    ptx::mbarrier_wait(full(place), parity);
    if (wanted[place]) {
      if (p.initial_state == nullptr) {
        worker.clear();
      } else if (p.state_dtype == DType::kFloat32) {
        worker.template take<float>(at);
      } else if (p.state_dtype == DType::kFloat16) {
        worker.template take<half_t>(at);
      } else {
        worker.template take<bfloat16_t>(at);
      }
      worker.update(o());
      if (p.state_dtype == DType::kFloat32) {
        worker.template give<float>(at);
      } else if (p.state_dtype == DType::kFloat16) {
        worker.template give<half_t>(at);
      } else {
        worker.template give<bfloat16_t>(at);
      }
    } else if (worker.thread < StepRing::kSize) {
      o()[worker.thread] = from_float<T>(0.f);
    }
    ptx::fence_proxy_async();
    worker.meet();  // what is shared has been read, too
    if (worker.thread == 0) ptx::mbarrier_arrive(done(place));
    place += StepRing::kGroups;
    if (place >= places) place -= places, parity ^= 1;
  }
#endif
}

// Whether the kernel above takes a call: one token each, whole states, and enough heads for a ring to turn.
inline bool takes_step_ring(const DeltaRuleParams& p, int num_sms) {
  const DeltaRuleInputs& in = p.in;
  const int64_t heads = in.num_sequences * in.num_value_heads;
  if (in.num_tokens != 1 || in.key_dim != StepRing::kSize || in.value_dim != StepRing::kSize || p.snapshots)
    return false;
  for (const void* states : {p.initial_state, static_cast<const void*>(p.final_state)})
    if (reinterpret_cast<uintptr_t>(states) % 16 != 0) return false;
  return heads >= 4 * num_sms && heads < 1 << 30;
}

// False: this binary or the device has none.
template <typename T, bool kRowGate, bool kVFirst>
bool launch_step_ring(const DeltaRuleParams& p, const Launch& where) {
  constexpr auto kKernel = delta_step_ring_kernel<T, kRowGate, kVFirst>;
  static PerDevice<bool> found;
  const bool there = found.get(where.device, [](int device) {
    cudaFuncAttributes attributes{};
    if (attribute(cudaDevAttrComputeCapabilityMajor, device) != 9) return false;
    check(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
    if (attributes.sharedSizeBytes == 0 || attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) <
                                               static_cast<int>(attributes.sharedSizeBytes) + StepRing::kBytes)
      return false;
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, StepRing::kBytes),
          "cudaFuncSetAttribute");
    return true;
  });
  if (!there) return false;
  const int bytes = static_cast<int>(size_of(p.state_dtype)) * StepRing::kSize * StepRing::kSize;
  const int places = bytes * StepRing::kPlaces <= StepRing::kBytes ? StepRing::kPlaces : StepRing::kBytes / bytes;
  launch(kKernel, static_cast<unsigned>(device_info(where.device).num_sms), StepRing::kAllThreads, places * bytes,
         where, p, bytes, places);
  return true;
}

template <typename T>
bool delta_step_ring(const DeltaRuleParams& p, const Launch& where) {
  if (!takes_step_ring(p, device_info(where.device).num_sms)) return false;
  if (p.in.gk)
    return p.in.v_first ? launch_step_ring<T, true, true>(p, where) : launch_step_ring<T, true, false>(p, where);
  return p.in.v_first ? launch_step_ring<T, false, true>(p, where) : launch_step_ring<T, false, false>(p, where);
}

}  // namespace flashinfer::cuda
