// Values that source files add to a list of their module, so that a new file needs no edit elsewhere.
#pragma once

namespace flashinfer {

// An entry of the module's list of all `T`. Define it as a constant of a source file. The list is complete
// when the module has loaded, whatever the order of the files.
template <typename T>
class Registered {
 public:
  explicit Registered(const T& value) : value_(value), next_(first_) { first_ = this; }
  Registered(const Registered&) = delete;

  // Call `visit` with each value until it returns true. Return false if it never does.
  template <typename Visit>
  static bool any(Visit&& visit) {
    for (const Registered* one = first_; one; one = one->next_)
      if (visit(one->value_)) return true;
    return false;
  }

 private:
  static inline const Registered* first_ = nullptr;  // constant initialisation comes before every constructor
  const T value_;
  const Registered* const next_;
};

}  // namespace flashinfer
