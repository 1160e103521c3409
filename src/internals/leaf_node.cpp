#include "tessera/internals/detail/leaf_node.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/internals/detail/gradient_hooks.h"

namespace tessera::detail {
namespace {

/// What nodes show to classes that derive from them.
struct Opened : Node {
  static std::mutex& mutex_of(Node& node) { return node.*(&Opened::mutex_); }
};

/// Whether the backward of this thread adds to the gradients of all leaves that it reaches.
bool accumulates_all() {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  return asked != nullptr && asked->empty() && !c10::GradMode::is_enabled();
}

}  // namespace

OpenGradient::OpenGradient(Node& node, const Edge& edge) {
  LeafNode* leaf = as_leaf(edge);
  if (leaf == nullptr || !accumulates_all() || leaf->stream() != node.stream() ||
      has_hooks_of_program(*leaf)) {
    return;
  }
  std::unique_lock lock(Opened::mutex_of(*leaf));
  const at::Tensor& gradient = leaf->variable.grad();
  if (gradient.defined() && !gradient.requires_grad()) {
    tensor_ = gradient;
    lock_ = std::move(lock);
  }
}

}  // namespace tessera::detail
