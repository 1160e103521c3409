#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/libtorch_kernels.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

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
  // Says for each node whether this backward executes the node; empty if all nodes are executed.
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

namespace {

struct Opened : Node {
  static std::mutex& mutex_of(Node& node) { return node.*(&Opened::mutex_); }
};

/// Whether this thread's backward adds to `.grad` of all leaves and does not create a graph.
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

namespace {

using torch::autograd::FunctionPreHook;
using CppHook = std::function<at::TensorBase(const at::TensorBase&)>;

/// The class of the tensor hooks that Tessera registers. Hooks of the program have other classes.
struct Tagged {
  OwnHook what;
  std::function<at::Tensor(const at::Tensor&)> hook;

  at::TensorBase operator()(const at::TensorBase& gradient) const {
    return hook(at::Tensor(gradient));
  }
};

bool is_of_program(const CppHook& hook) {
  return hook && hook.target<Tagged>() == nullptr;
}

// dynamic_cast and UBSan need type information that libtorch does not export for its hook classes.
// Therefore, the mangled class name from typeid is compared.
#define TESSERA_WITHOUT_TYPE_CHECK __attribute__((no_sanitize("vptr")))

template <class T>
TESSERA_WITHOUT_TYPE_CHECK const T* hook_cast(const FunctionPreHook& hook,
                                              std::string_view mangled) {
  return typeid(hook).name() == mangled ? static_cast<const T*>(&hook) : nullptr;
}

TESSERA_WITHOUT_TYPE_CHECK bool is_of_program(const std::unique_ptr<FunctionPreHook>& hook) {
  const auto* list = hook_cast<torch::autograd::CppFunctionTensorPreHook>(
      *hook, "N5torch8autograd24CppFunctionTensorPreHookE");
  if (list != nullptr) {
    return std::ranges::any_of(*list->hooks_,
                               [](const CppHook& each) { return is_of_program(each); });
  }
  const auto* single = hook_cast<torch::autograd::CppFunctionSingleTensorPreHook>(
      *hook, "N5torch8autograd30CppFunctionSingleTensorPreHookE");
  return single == nullptr || is_of_program(single->hook_);
}

/// Whether the node's class is a torch::autograd::Function or a class of the program.
TESSERA_WITHOUT_TYPE_CHECK bool is_node_of_program(const torch::autograd::Node& node) {
  const std::string_view mangled = typeid(node).name();
  if (mangled.starts_with("N5torch8autograd")) {
    return mangled.starts_with("N5torch8autograd7CppNodeI") ||
           mangled == "N5torch8autograd6PyNodeE";
  }
  return !mangled.starts_with("N7tessera");
}

}  // namespace

void add_own_hook(const at::Tensor& tensor, OwnHook what,
                  std::function<at::Tensor(const at::Tensor&)> hook) {
  at::impl::GetVariableHooks()->_register_hook(tensor, Tagged{what, std::move(hook)});
}

bool has_own_hook(const at::Tensor& tensor, OwnHook what) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->cpp_hooks_list_ != nullptr &&
         std::ranges::any_of(*meta->cpp_hooks_list_, [&](const CppHook& hook) {
           const auto* tagged = hook.target<Tagged>();
           return tagged != nullptr && tagged->what == what;
         });
}

BackwardCode backward_code() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return BackwardCode::kNone;
  }
  return is_node_of_program(*node) || has_hooks_of_program(*node) ? BackwardCode::kFormulaOrProgram
                                                                  : BackwardCode::kFormula;
}

bool has_hooks_of_program(torch::autograd::Node& node) {
  const auto of_program = [](const auto& hook) { return is_of_program(hook); };
  return std::ranges::any_of(node.tensor_pre_hooks(), of_program) || !node.pre_hooks().empty() ||
         !node.post_hooks().empty() || node.tensor_post_acc_grad_hooks() != nullptr;
}

bool has_hooks(const at::Tensor& leaf) {
  return !torch::autograd::impl::hooks(leaf).empty();
}

at::Tensor call_hooks(const at::Tensor& leaf, const at::Tensor& gradient) {
  torch::autograd::variable_list gradients{gradient};
  for (const auto& hook : torch::autograd::impl::hooks(leaf)) {
    gradients = (*hook)(gradients);
  }
  return gradients.front();
}

void call_hook_after_grad(const at::Tensor& leaf) {
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(leaf)) {
    (*hook)(leaf);
  }
}

void move_hooks(const at::Tensor& from, const at::Tensor& to) {
  namespace impl = torch::autograd::impl;
  const auto* meta = impl::get_autograd_meta(from);
  if (meta->cpp_hooks_list_ != nullptr) {
    to.register_hook([hooks = meta->cpp_hooks_list_](at::Tensor gradient) {
      for (const CppHook& hook : *hooks) {
        const at::Tensor changed(hook ? hook(gradient) : at::TensorBase());
        gradient = changed.defined() ? changed : gradient;
      }
      return gradient;
    });
  }
  if (auto& hook = impl::post_acc_grad_hooks(from)) {
    impl::set_post_acc_grad_hooks(to, std::move(hook));
  }
}

namespace {

using torch::autograd::Engine;

/// The installed EngineAnswers; nullptr before the first install_engine().
std::atomic<const EngineAnswers*> answers_of_process = nullptr;

Engine& answering_engine() {
  // Never destroyed, because autograd's threads run until the process ends.
  static AnsweringEngine engine;
  return engine;
}

}  // namespace

std::unique_ptr<SavedVariableHooks> AnsweringEngine::get_default_saved_variable_hooks() {
  const EngineAnswers* answers = answers_of_process;
  return answers == nullptr ? nullptr : answers->hooks();
}

variable_list AnsweringEngine::execute(const edge_list& roots, const variable_list& gradients,
                                       bool keep_graph, bool create_graph, bool accumulate,
                                       const edge_list& outputs) {
  const EngineAnswers* answers = answers_of_process;
  if (answers == nullptr || outputs.empty()) {
    return Engine::execute(roots, gradients, keep_graph, create_graph, accumulate, outputs);
  }
  return answers->execute({roots, gradients, keep_graph, create_graph, accumulate, outputs},
                          [this](const BackwardCall& call) {
                            return Engine::execute(call.roots, call.gradients, call.keep_graph,
                                                   call.create_graph, call.accumulate,
                                                   call.outputs);
                          });
}

bool hooks_keep_tensors() {
  return Engine::get_default_engine().get_default_saved_variable_hooks() != nullptr;
}

bool install_engine(const EngineAnswers& answers) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  Engine& current = Engine::get_default_engine();
  if (&current == &Engine::get_base_engine()) {
    torch::autograd::set_default_engine_stub(&answering_engine);
  } else if (dynamic_cast<AnsweringEngine*>(&current) == nullptr) {
    return false;
  }
  if (answers_of_process == nullptr) {
    answers_of_process = new EngineAnswers(answers);
  }
  return true;
}

}  // namespace tessera::detail
