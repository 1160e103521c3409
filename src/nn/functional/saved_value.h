#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace tessera::nn {

template <class T>
struct SavedValue : torch::CustomClassHolder {
  explicit SavedValue(T v) : value(std::move(v)) {}
  T value;
};

/// Keeps any value for backward. For what is not a tensor; one per function.
template <class T>
void save_value(torch::autograd::AutogradContext* context, T value) {
  context->saved_data["value"] =
      c10::IValue::make_capsule(c10::make_intrusive<SavedValue<T>>(std::move(value)));
}

template <class T>
const T& saved_value(torch::autograd::AutogradContext* context) {
  const auto holder = context->saved_data.at("value").toCapsule();
  return static_cast<const SavedValue<T>&>(*holder).value;  // kept alive by the context
}

}  // namespace tessera::nn
