#include "pending_gradients.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::tensor_parallel {
namespace {

/// The group over which a gradient of a replicated leaf is still to be summed, or nullptr.
comm::Communicator* pending_group(const at::Tensor& gradient) {
  if (!gradient.defined() || !tessera::is_distributed(gradient)) {
    return nullptr;
  }
  const ShardingSpec& spec = sharding_spec(gradient);
  const std::vector<PartialDim>& partial = spec.layout->partial();
  const bool is_sum = partial.size() == 1 && partial[0].op == ReduceOp::kSum;
  return is_sum ? &spec.mesh.group(partial[0].mesh_dim) : nullptr;
}

}  // namespace

void PendingGradients::watch(const std::vector<nn::SlotPtr>& slots) {
  for (const nn::SlotPtr& slot : slots) {
    const at::Tensor& leaf = slot->get();
    if (leaf.requires_grad() && tessera::is_distributed(leaf) &&
        sharding_spec(leaf).layout->is_replicated() && leave_gradient_pending(leaf)) {
      watch(leaf);
    }
  }
}

void PendingGradients::watch(const at::Tensor& leaf) {
  // By weak reference: the hook lives in the leaf's own autograd state.
  leaf.register_hook([self = shared_from_this(),
                      weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                          leaf.getIntrusivePtr())](const at::Tensor& gradient) {
    return self->take(at::Tensor(weak.lock()), gradient);
  });
}

at::Tensor PendingGradients::take(const at::Tensor& leaf, const at::Tensor& gradient) {
  comm::Communicator* group = pending_group(gradient);
  if (group == nullptr) {
    return gradient;
  }
  const c10::AutoGradMode no_grad(false);
  begin(torch::autograd::get_current_graph_task_id());
  terms_.push_back({leaf, local_tensor(gradient), group});
  return make_distributed(at::zeros_like(local_tensor(gradient)), sharding_spec(leaf),
                          leaf.sizes().vec());
}

void PendingGradients::begin(int backward) {
  if (backward_ == backward) {
    return;
  }
  backward_ = backward;
  terms_.clear();  // of a backward that failed
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->settle(); });
}

void PendingGradients::settle() {
  const c10::AutoGradMode no_grad(false);
  DeferredSums sums;
  for (const Term& term : std::exchange(terms_, {})) {
    sums.add(*term.group, term.value,
             [leaf = term.leaf](const at::Tensor& sum) { local_tensor(leaf.grad()).add_(sum); });
  }
  sums.run();
  backward_ = -1;
}

}  // namespace tessera::tensor_parallel
