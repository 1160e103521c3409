#include "tessera/internals/detail/running_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string_view>
#include <utility>

namespace tessera::detail {

int backward_id() {
  return torch::autograd::get_current_graph_task_id();
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

std::string running_node() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return "";
  }
  std::string name = node->name();
  if (const std::string_view own = "torch::autograd::CppNode<"; name.starts_with(own)) {
    name = name.substr(own.size(), name.size() - own.size() - 1);
  }
  return name;
}

std::optional<std::uint64_t> origin_of_running_node() {
  const auto node = torch::autograd::get_current_node();
  return node == nullptr ? std::nullopt : std::optional(node->thread_id());
}

void queue_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace tessera::detail
