// Routing: a warp chooses the top_k experts of a token, one after the other, in the order of descending keys.
// Of equal keys, the smaller index comes first.
#pragma once

#include <cstdint>

#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cuda/host/launch.cuh>
#include <flashinfer/cuda/tile/convert.cuh>
#include <flashinfer/cuda/tile/reduce.cuh>

namespace flashinfer::cuda {

constexpr int kRouteWarps = 4;

// Return an unsigned key in the order of floats. It is 0 for -inf and NaN, which are never chosen.
__device__ __forceinline__ uint32_t key_of(float value) {
  if (!(value > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(value + 0.f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return key == 0 ? -INFINITY : __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Set key to the largest key over the warp, and number to the smallest number with that key.
__device__ __forceinline__ void argmax_over_warp(uint32_t& key, int& number) {
  const uint32_t best = __reduce_max_sync(kAllLanes, key);
  number = static_cast<int>(__reduce_min_sync(kAllLanes, key == best ? static_cast<unsigned>(number) : 0x7fffffffu));
  key = best;
}

// Routing of one token. Lane l has the experts l, l + 32, and so on: kPerLane keys in registers. With
// kPerLane = 0 there may be any number of experts, and the logits are reread on every use.
template <typename T, int kPerLane>
struct TokenRoute {
  const RouteParams& p;
  const T* row;
  int lane;
  float max_logit, sum_exp;
  uint32_t groups;  // a bit for each chosen group of experts
  uint32_t keys[kPerLane ? kPerLane : 1];

  __device__ __forceinline__ TokenRoute(const RouteParams& params, int64_t token)
      : p(params),
        row(static_cast<const T*>(params.logits) + token * params.logits_stride),
        lane(threadIdx.x % 32),
        groups(kAllLanes) {
    max_logit = 0.f, sum_exp = 1.f;
    if (p.is_softmax()) {
      uint32_t key = 0;
      for (int e = lane; e < p.experts; e += 32) key = max(key, key_of(logit(e)));
      max_logit = value_of(__reduce_max_sync(kAllLanes, key));
      sum_exp = 0.f;
      for (int e = lane; e < p.experts; e += 32) sum_exp += exponential(logit(e));
      sum_exp = lanes_sum<32>(sum_exp);
    }
    if constexpr (kPerLane > 0) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int e = lane + 32 * i;
        keys[i] = e < p.experts ? choice_key(e) : 0;
      }
    }
  }

  __device__ __forceinline__ float logit(int e) const {
    const float x = to_float(row[e]);
    return x == x ? x : -INFINITY;
  }
  __device__ __forceinline__ float exponential(float x) const { return x == max_logit ? 1.f : expf(x - max_logit); }
  __device__ __forceinline__ float score(int e) const {
    const float x = logit(e);
    if (p.is_softmax()) return exponential(x) / sum_exp;
    return p.is_sigmoid() || p.method == RoutingMethod::kLlama4 ? 1.f / (1.f + expf(-x)) : x;
  }
  // Return the key by which an expert is chosen.
  __device__ __forceinline__ uint32_t choice_key(int e) const {
    const float x = logit(e);
    if (!p.scores_choose() || x == -INFINITY) return key_of(x);
    return key_of(score(e) + (p.bias ? p.bias[e] : 0.f));
  }

  template <typename Body>
  __device__ __forceinline__ void each(const Body& body) const {
    if constexpr (kPerLane > 0) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) body(lane + 32 * i, keys[i]);
    } else {
      for (int e = lane; e < p.experts; e += 32) body(e, choice_key(e));
    }
  }

  // Choose the top_groups best groups. Lane g has the score of group g.
  __device__ __forceinline__ void keep_groups() {
    const int size = p.experts / p.num_groups;
    uint32_t group_key = 0;
    for (int g = 0; g < p.num_groups; ++g) {
      uint32_t first = 0, second = 0;
      each([&](int e, uint32_t key) {
        if (e < g * size || e >= (g + 1) * size) return;
        second = max(second, min(first, key));
        first = max(first, key);
      });
      const uint32_t best = __reduce_max_sync(kAllLanes, first);
      // `next` is the second largest key of the group: one lane with the largest gives its second key, all
      // other lanes their first.
      const unsigned holders = __ballot_sync(kAllLanes, first == best);
      const uint32_t other = lane == __ffs(holders) - 1 ? second : first;
      const uint32_t next = __reduce_max_sync(kAllLanes, other);
      const bool two = p.sums_best_two() && size > 1;
      if (lane == g) group_key = key_of(two ? value_of(best) + value_of(next) : value_of(best));
    }
    groups = 0;
    bool is_candidate = lane < p.num_groups;
    for (int i = 0; i < p.top_groups; ++i) {
      // A group with a score of -inf or NaN gets key 1: it comes after other groups, but before lanes without
      // a candidate.
      uint32_t key = is_candidate ? max(group_key, 1u) : 0u;
      int number = lane;
      argmax_over_warp(key, number);
      groups |= 1u << number;
      if (lane == number) is_candidate = false;
    }
  }

  __device__ __forceinline__ void run(int64_t token) {
    if (p.num_groups > 1) keep_groups();
    const int size = p.num_groups > 1 ? p.experts / p.num_groups : p.experts;
    uint32_t last_key = 0xffffffffu;
    int last = -1, chosen = -1;
    for (int j = 0; j < p.top_k; ++j) {
      uint32_t key = 0;
      int number = 0x7fffffff;
      each([&](int e, uint32_t at) {
        const bool after = at < last_key || (at == last_key && e > last);
        if (at > key && after && (p.num_groups == 1 || (groups >> (e / size) & 1))) key = at, number = e;
      });
      argmax_over_warp(key, number);
      last_key = key, last = number;
      if (lane == j) chosen = key ? number : -1;
      if (!key) break;  // no expert is left for lane j and later ones
    }
    const float own_score = chosen >= 0 ? score(chosen) : 0.f;
    const float factor = p.renormalizes() ? p.factor / (lanes_sum<32>(own_score) + 1e-20f) : p.factor;
    if (lane >= p.top_k) return;
    const int64_t to = token * p.weights_stride + lane;
    if (p.narrow) {
      static_cast<T*>(p.weights)[to] = from_float<T>(own_score * factor);
    } else {
      static_cast<float*>(p.weights)[to] = own_score * factor;
    }
    const int64_t at = token * p.ids_stride + lane;
    if (p.wide_ids) {
      static_cast<int64_t*>(p.ids)[at] = chosen;
    } else {
      static_cast<int32_t*>(p.ids)[at] = chosen;
    }
  }
};

template <typename T, int kPerLane>
__global__ void __launch_bounds__(32 * kRouteWarps) route_kernel(const RouteParams p) {
  const int64_t token = int64_t{blockIdx.x} * kRouteWarps + threadIdx.x / 32;
  if (token >= p.tokens) return;
  wait_for_inputs();
  launch_dependents();
  TokenRoute<T, kPerLane> route(p, token);
  route.run(token);
}

template <typename T>
void route(const RouteParams& p, const Launch& where) {
  const auto blocks = static_cast<unsigned>((p.tokens + kRouteWarps - 1) / kRouteWarps);
  const auto kernel = p.experts <= 64    ? route_kernel<T, 2>
                      : p.experts <= 256 ? route_kernel<T, 8>
                      : p.experts <= 512 ? route_kernel<T, 16>
                                         : route_kernel<T, 0>;
  launch(kernel, blocks, 32 * kRouteWarps, where, p);
}

}  // namespace flashinfer::cuda
