// Arguments and results of operators in the form of torch's stable ABI.
//
// TORCH_BOX does the same with a shared pointer per tensor and a tuple of all arguments. That costs 0.1 us a
// call and half a second a file, for copies that no operator here makes.
#pragma once

// Bindings convert no halves. Without this, torch's half includes all of <immintrin.h>.
#pragma push_macro("__F16C__")
#undef __F16C__
#include <torch/csrc/stable/library.h>
#pragma pop_macro("__F16C__")

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace flashinfer::binding {

// A tensor, with a reference that this operator owns.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&&) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_;
};

template <typename T>
T unboxed(StableIValue value) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return Tensor(torch::stable::detail::to<AtenTensorHandle>(value));
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return handle ? std::optional<Tensor>(Tensor(*handle)) : std::nullopt;
  } else {
    return torch::stable::detail::to<T>(value);
  }
}

inline void put(StableIValue* stack, Tensor&& result) { stack[0] = torch::stable::detail::from(result.release()); }
inline void put(StableIValue* stack, int64_t result) { stack[0] = torch::stable::detail::from(result); }

template <typename... T>
void put(StableIValue* stack, std::tuple<T...>&& results) {
  size_t i = 0;
  std::apply([&](T&... result) { (put(stack + i++, std::move(result)), ...); }, results);
}

template <typename Function>
struct Boxing;

template <typename R, typename... A>
struct Boxing<R (*)(A...)> {
  template <auto kFunction, size_t... I>
  static void call(StableIValue* stack, uint64_t num_args, std::index_sequence<I...>) {
    if (num_args != sizeof...(A)) {
      throw std::runtime_error("the schema has " + std::to_string(num_args) + " arguments, the operator " +
                               std::to_string(sizeof...(A)));
    }
    if constexpr (std::is_void_v<R>) {
      kFunction(unboxed<std::decay_t<A>>(stack[I])...);
    } else {
      put(stack, kFunction(unboxed<std::decay_t<A>>(stack[I])...));
    }
  }

  using Indices = std::index_sequence_for<A...>;
};

// Wraps `kFunction` in the signature that a library registers.
template <auto kFunction>
void box(StableIValue* stack, uint64_t num_args, uint64_t) {
  using Boxed = Boxing<decltype(kFunction)>;
  Boxed::template call<kFunction>(stack, num_args, typename Boxed::Indices());
}

}  // namespace flashinfer::binding
