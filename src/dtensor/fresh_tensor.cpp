#include "fresh_tensor.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>

#include "distributed_impl.h"

namespace tessera::detail {
namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

std::optional<WeakTensor>& fresh() {
  thread_local std::optional<WeakTensor> tensor;
  return tensor;
}

bool inside_backward() {
  return torch::autograd::get_current_graph_task_id() >= 0 && !at::GradMode::is_enabled();
}

bool is_fresh(const at::Tensor& tensor) {
  if (!inside_backward() || !fresh()) return false;
  const auto held = fresh()->lock();
  return held && held.get() == tensor.unsafeGetTensorImpl();
}

}  // namespace

void note_fresh(const at::Tensor& tensor) {
  if (inside_backward()) fresh().emplace(tensor.getIntrusivePtr());
}

bool write_to_fresh(const OperatorInfo& info, torch::jit::Stack& stack) {
  const auto first = stack.size() - info.arguments.size();
  const auto self = stack[first].toTensor();
  auto* impl = as_distributed(self);
  if (impl == nullptr || !is_fresh(self)) return false;
  fresh().reset();
  stack.resize(first + info.functional->schema().arguments().size());
  info.functional->callBoxed(stack);
  const auto result = stack.back().toTensor();
  const auto* written = as_distributed(result);
  impl->replace(written->local(), written->spec());
  stack.back() = self;
  return true;
}

}  // namespace tessera::detail
