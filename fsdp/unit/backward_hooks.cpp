// How a unit learns where backward is. libtorch's C++ modules have no backward hooks, so that the
// unit's arguments are led through an autograd node of ours, and its results get tensor hooks. The
// rest of this room sees callbacks only.

#include "unit/backward_hooks.h"

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/internals/detail/gradient_hooks.h"
#include "tessera/internals/detail/graph_node.h"

namespace tessera::fsdp {
namespace {

using torch::autograd::variable_list;

/// The identity, with a callback in its backward. Its sequence number is lower than that of every
/// node made after it, so the engine runs it after all of those that are ready.
struct CallAfter final : torch::autograd::Node {
  explicit CallAfter(GradientHook then) : callback(std::move(then)) {}

  variable_list apply(variable_list&& gradients) override {
    std::vector<at::Tensor*> tensors;
    for (at::Tensor& gradient : gradients) {
      tensors.push_back(&gradient);
    }
    callback(tensors);
    return std::move(gradients);
  }

  /// What libtorch names where the output is changed in place.
  std::string name() const override {
    return "fully_shard (forward of a unit must not change its arguments in place: clone them "
           "first)";
  }

  GradientHook callback;
};

/// The same values as a view, which libtorch refuses to change in place: the node would be lost,
/// and `tensor` would have new values with its old history.
at::Tensor guarded_view(const at::Tensor& tensor) {
  return torch::autograd::as_view(tensor, tensor.tensor_data(), /*is_bw_differentiable=*/true,
                                  /*is_fw_differentiable=*/true, /*view_func=*/nullptr,
                                  /*rev_view_func=*/nullptr,
                                  torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

bool needs_gradient(const at::Tensor* tensor) {
  return tensor->defined() && tensor->requires_grad();
}

}  // namespace

bool call_after_backward(nn::TensorList tensors, GradientHook callback) {
  // Only tensors that need a gradient become inputs of the node: the others' order does not matter,
  // since the callback looks at none of them by position.
  variable_list inputs;
  for (const at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      inputs.push_back(*tensor);
    }
  }
  if (inputs.empty()) {
    return false;
  }
  const auto node = tessera::detail::make_node<CallAfter>(std::move(callback));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (at::Tensor* tensor : tensors) {
    if (needs_gradient(tensor)) {
      *tensor = guarded_view(*tensor);
      torch::autograd::set_history(*tensor, node);
    }
  }
  return true;
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

bool backward_runs() {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

}  // namespace tessera::fsdp
