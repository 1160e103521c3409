#include "tessera/internals/detail/autograd_record.h"
#include "tessera/internals/detail/guarded_view.h"
#include "tessera/internals/detail/node_hooks.h"
#include "tessera/internals/detail/refused_gradient.h"
#include "tessera/internals/detail/running_backward.h"

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <string_view>
#include <utility>

namespace tessera::detail {
namespace {

class Before final : public torch::autograd::FunctionPreHook {
 public:
  explicit Before(std::function<void()> call) : call_(std::move(call)) {}
  variable_list operator()(const variable_list& gradients) override {
    call_();
    return gradients;
  }

 private:
  std::function<void()> call_;
};

class After final : public torch::autograd::FunctionPostHook {
 public:
  explicit After(std::function<void()> call) : call_(std::move(call)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

}  // namespace

void set_name(const at::Tensor& tensor, const std::string& name) {
  torch::autograd::impl::set_name(tensor, name);
}

bool is_trainable_leaf(const c10::TensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(impl.autograd_meta())->requires_grad_;
}

const at::TensorBase& viewed_by(const at::TensorBase& tensor) {
  const auto* views = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (views != nullptr && views->has_bw_view()) {
    return views->get_backward_view().base_;
  }
  if (views != nullptr && views->has_fw_view()) {
    return views->get_forward_view().base_;
  }
  return tensor;
}

at::Tensor guarded_view(const at::Tensor& tensor) {
  return torch::autograd::as_view(tensor, tensor.tensor_data(), /*is_bw_differentiable=*/true,
                                  /*is_fw_differentiable=*/true, /*view_func=*/nullptr,
                                  /*rev_view_func=*/nullptr,
                                  torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

void watch_node(Node& node, std::function<void()> before, std::function<void()> after) {
  node.add_pre_hook(std::make_unique<Before>(std::move(before)));
  node.add_post_hook(std::make_unique<After>(std::move(after)));
}

torch::CppFunction refuse_gradient() {
  return torch::autograd::autogradNotImplementedFallback();
}

int backward_id() {
  return torch::autograd::get_current_graph_task_id();
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

bool is_in_backward(const Node* node) {
  auto* const key = const_cast<Node*>(node);
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || !nodes->contains(key)) {
    return false;
  }
  // Empty where all nodes run; else those that lead to the tensors that a gradient was asked of.
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) {
    return true;
  }
  const auto found = executed->find(key);
  return found != executed->end() && found->second.should_execute();
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
