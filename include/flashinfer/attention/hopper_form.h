// Variants in FlashInfer's form for Hopper: a constructor (const MainloopParams&, const BlockCoord&), own
// parameters in params.additional_params, and GetAttentionUpdater(), whose type selects softmax or none. Such
// a variant works on every backend, as do variants of the other form.
#pragma once

#include <flashinfer/attention/variant.h>

#include <type_traits>
#include <utility>

namespace flashinfer {

// The result of GetAttentionUpdater(): softmax of logits times a scale that includes log2(e), softmax of
// logits that already include it, or no softmax.
template <int kRowsOfThread, bool kWithScale>
struct OnlineSoftmax {
  static constexpr bool kSoftmax = true;
  float scale;
  FLASHINFER_HD explicit OnlineSoftmax(float scale_) : scale(kWithScale ? scale_ : 1.0f) {}
};
template <int kRowsOfThread>
struct DefaultUpdater {
  static constexpr bool kSoftmax = false;
};

// nvcc shows the host no body and no type of a function that is only __device__: the host does not inspect
// it.
template <typename Updater>
struct UpdaterSeen {
  using type = Updater;
};
template <>
struct UpdaterSeen<void> {
  using type = DefaultUpdater<2>;
};

template <typename Params>
struct MainloopParams {
  const Params& additional_params;
};

// A field that only hooks receive. A variant is made once per request, before tile, heads and starts are
// known, so a use of these fields is a compile error.
struct ToldByHooks {};
struct BlockCoord {
  ToldByHooks q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr;
  int32_t qo_len, kv_len, batch_idx;
};

template <typename V, typename = void>
constexpr bool has_hopper_form = false;
template <typename V>
constexpr bool has_hopper_form<V, std::void_t<decltype(std::declval<V&>().template GetAttentionUpdater<2>())>> = true;

// Adapts a variant of that form to the form that kernels need.
template <typename V>
struct FromHopperForm : V {
  using Updater = typename UpdaterSeen<decltype(std::declval<V&>().template GetAttentionUpdater<2>())>::type;
  static constexpr bool use_softmax = Updater::kSoftmax;
  static constexpr bool transforms_query = V::transforms_query, transforms_key = V::transforms_key;
  static constexpr bool transforms_logits = V::transforms_logits, masks_logits = V::masks_logits;
  static constexpr bool transforms_output = V::transforms_output, normalises_output = V::normalises_output;
  float sm_scale_log2 = 1.0f;

  template <typename Params>
  FLASHINFER_HD FromHopperForm(const Params& params, uint32_t batch_idx, uint8_t*)
      : V(MainloopParams<Params>{params}, BlockCoord{{},
                                                     {},
                                                     {},
                                                     {},
                                                     {},
                                                     params.get_qo_len(batch_idx),
                                                     params.get_kv_len(batch_idx),
                                                     static_cast<int32_t>(batch_idx)}) {
    if constexpr (use_softmax) sm_scale_log2 = V::template GetAttentionUpdater<2>().scale;
  }

  template <typename Params, typename T>
  FLASHINFER_HD T QueryTransform(const Params& params, T q) const {
    return V::QueryTransform(MainloopParams<Params>{params}, q);
  }
  template <typename Params, typename T>
  FLASHINFER_HD T KeyTransform(const Params& params, T k) const {
    return V::KeyTransform(MainloopParams<Params>{params}, k);
  }
  template <typename Params, typename T>
  FLASHINFER_HD T LogitsTransform(const Params& params, T logits, uint32_t batch_idx, uint32_t qo_idx, uint32_t kv_idx,
                                  uint32_t qo_head_idx, uint32_t kv_head_idx) const {
    return V::LogitsTransform(MainloopParams<Params>{params}, logits, batch_idx, qo_idx, kv_idx, qo_head_idx,
                              kv_head_idx);
  }
  template <typename Params>
  FLASHINFER_HD bool LogitsMask(const Params& params, uint32_t batch_idx, uint32_t qo_idx, uint32_t kv_idx,
                                uint32_t qo_head_idx, uint32_t kv_head_idx) const {
    return V::LogitsMask(MainloopParams<Params>{params}, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx);
  }
  template <typename Params, typename T>
  FLASHINFER_HD T OutputTransform(const Params& params, T output, uint32_t batch_idx, uint32_t qo_idx,
                                  uint32_t qo_head_idx) const {
    return V::OutputTransform(MainloopParams<Params>{params}, output, batch_idx, qo_idx, qo_head_idx);
  }
  template <typename Params, typename T>
  FLASHINFER_HD T OutputTransform(const Params& params, T output, uint32_t batch_idx, uint32_t qo_idx,
                                  uint32_t qo_head_idx, float m, float d, float scale) const {
    return V::OutputTransform(MainloopParams<Params>{params}, output, batch_idx, qo_idx, qo_head_idx, m, d, scale);
  }
};

}  // namespace flashinfer
