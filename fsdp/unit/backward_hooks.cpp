// How a unit learns where backward is. libtorch's C++ modules have no backward hooks, so the unit's
// arguments pass through an autograd node of FSDP's, and its results get tensor hooks. The other
// files of this folder see callbacks only.

#include "unit/backward_hooks.h"

#include <string>
#include <utility>
#include <vector>

#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::fsdp {
namespace {

using tessera::detail::variable_list;

/// The identity, with a callback in its backward. Its sequence number is lower than that of every
/// node made after it, so the engine runs it after all of those that are ready.
struct CallAfter final : tessera::detail::Node {
  explicit CallAfter(GradientHook then) : callback(std::move(then)) {}

  variable_list apply(variable_list&& gradients) override {
    std::vector<at::Tensor*> tensors;
    for (at::Tensor& gradient : gradients) {
      tensors.push_back(&gradient);
    }
    callback(tensors);
    return std::move(gradients);
  }

  /// The name that libtorch's error shows if the output is changed in place.
  std::string name() const override {
    return "fully_shard (forward of a unit must not change its arguments in place: clone them "
           "first)";
  }

  GradientHook callback;
};

bool needs_gradient(const at::Tensor* tensor) {
  return tensor->defined() && tensor->requires_grad();
}

}  // namespace

void call_after_backward(nn::TensorList tensors, GradientHook callback) {
  // Only tensors that need a gradient become inputs of the node: the others' order does not matter,
  // since the callback looks at none of them by position.
  variable_list inputs;
  for (const at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      inputs.push_back(*tensor);
    }
  }
  if (inputs.empty()) {
    return;
  }
  const auto node = tessera::detail::make_node<CallAfter>(std::move(callback));
  tessera::detail::set_inputs(*node, inputs);
  for (at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      *tensor = tessera::detail::guarded_view(*tensor);
      tessera::detail::set_node(*tensor, node);
    }
  }
}

bool call_before_backward(nn::TensorList tensors, const std::function<void()>& callback) {
  bool any = false;
  for (const at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      // A hook on each result: which of them backward reaches first is not known, and some it may
      // never reach. pre_backward() ignores all but the first.
      tessera::detail::add_own_hook(*tensor, tessera::detail::OwnHook::kNotice,
                                    [callback](const at::Tensor& gradient) {
                                      callback();
                                      return gradient;
                                    });
      any = true;
    }
  }
  return any;
}

}  // namespace tessera::fsdp
