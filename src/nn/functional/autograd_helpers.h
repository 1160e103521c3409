#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::nn {

// What the fused functions have in common. Each is an autograd function that works on the local
// tensors of its arguments.

/// The sharding of a function's tensor; nullopt: it is plain.
using MaybeSpec = std::optional<ShardingSpec>;

// The functions below take MaybeSpec, so that a fused function is written once for plain and
// distributed tensors.
MaybeSpec spec_of(const at::Tensor& tensor);
/// `local` as the local tensor of one with this spec and these global sizes; without a spec,
/// itself.
at::Tensor wrap_local(const at::Tensor& local, const MaybeSpec& spec,
                      const std::vector<std::int64_t>& sizes);
/// This rank's part of a gradient, which is redistributed if its spec is another one.
at::Tensor local_gradient(const at::Tensor& grad, const MaybeSpec& spec);

/// The FQN of a parameter, in quotes after a space, or nothing if it has none. For messages.
std::string quoted_name(const at::Tensor& parameter);

/// Throws Error in a backward pass that is itself recorded: `function` is differentiable once.
void refuse_double_backward(const char* function);
/// Throws Error for a distributed tensor that is a pending reduction.
void refuse_partial(const char* function, const MaybeSpec& spec);

template <class T>
/// A custom class, since AutogradContext keeps IValues only.
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
