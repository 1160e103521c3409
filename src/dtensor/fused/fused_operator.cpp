#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>

#include "autograd/autograd.h"
#include "fused/fused_operator.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/core/sharding_rule.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/internals/detail/backward.h"

namespace tessera::detail {

// Code that all fused operators share: FusedNode, RecomputableNode, and the sharding rule of
// elementwise operators.

variable_list FusedNode::apply(variable_list&& gradients) {
  TESSERA_CHECK(!c10::GradMode::is_enabled(), op_,
                " cannot be differentiated twice; call backward without create_graph, or write the "
                "formula with at:: operators");
  const auto is_defined = [](const at::Tensor& gradient) { return gradient.defined(); };
  if (std::ranges::none_of(gradients, is_defined)) {
    return variable_list(num_outputs());
  }
  const std::lock_guard lock(mutex_);
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) {
      gradients[i] = in_layout_of_result(gradients[i], i);
    }
  }
  return differentiate(gradients);
}

void FusedNode::release_variables() {
  const std::lock_guard lock(mutex_);
  for (SavedVariable& variable : saved_) {
    variable.reset_data();
  }
}

void FusedNode::record(const at::Tensor& result) {
  const DistributedTensorImpl* impl = as_distributed(result);
  results_.push_back(impl != nullptr ? impl->spec() : nullptr);
  set_node(result, pointer_to(*this));
}

/// Redistributes a result's gradient to the layout of the result, so that the inputs' gradients get
/// the layouts of the inputs. A replicated gradient is not changed.
at::Tensor FusedNode::in_layout_of_result(const at::Tensor& gradient, std::size_t result) const {
  const TensorSpecPtr& spec = results_[result];
  const DistributedTensorImpl* given = as_distributed(gradient);
  if (spec == nullptr || given == nullptr || given->spec()->sharding.layout->is_replicated()) {
    return gradient;
  }
  const ShardingSpec& sharding = spec->sharding;
  return as_layout(gradient, {sharding.mesh, gradient_layout(sharding.layout)});
}

bool FusedNode::fits_result(const at::Tensor& tensor) const {
  const TensorSpecPtr& spec = results_.front();
  const DistributedTensorImpl* impl = as_distributed(tensor);
  if (spec == nullptr || impl == nullptr) {
    return spec == nullptr && impl == nullptr;
  }
  return impl->spec()->sharding == spec->sharding;
}

bool RecomputableNode::can_recompute(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  return tensor.output_nr() == 0 && !moves_ && writes_of(tensor) == writes_ && prepare();
}

RecomputableNode::Recomputed RecomputableNode::compute_for(const at::Tensor& gradient,
                                                           int backward) {
  if (!takes_gradient() || !gradient.defined() || c10::GradMode::is_enabled() ||
      !fits_result(gradient)) {
    return {.backward = backward, .result = compute()};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [result, gradients] = compute_with(gradient);
  return {backward, std::move(result), std::move(gradients), gradient, writes_of(gradient)};
}

at::Tensor RecomputableNode::recompute_for(const at::Tensor& gradient) {
  const int backward = backward_id();
  const std::lock_guard lock(mutex_);
  // Outside of a backward the result is not cached, because no end of a backward would free it.
  if (backward < 0) {
    return compute();
  }
  if (recomputed_ == nullptr || recomputed_->backward != backward) {
    recomputed_ = std::make_shared<Recomputed>(compute_for(gradient, backward));
    // Frees the recomputed result when the backward ends. apply() frees this result earlier, but
    // autograd does not call apply() if no requested gradient needs this node.
    queue_end_of_backward([held = std::weak_ptr<Recomputed>(recomputed_)] {
      if (const auto recomputed = held.lock()) {
        *recomputed = {};
      }
    });
  }
  return recomputed_->result;
}

variable_list RecomputableNode::apply(variable_list&& gradients) {
  {
    const std::lock_guard lock(mutex_);
    const auto recomputed = std::exchange(recomputed_, nullptr);
    if (recomputed != nullptr && recomputed->gradient.defined() &&
        recomputed->backward == backward_id() && gradients[0].is_same(recomputed->gradient) &&
        writes_of(gradients[0]) == recomputed->writes) {
      return std::move(recomputed->gradients);
    }
  }
  return FusedNode::apply(std::move(gradients));
}

RuleFunction::Body elementwise_rule(std::size_t results) {
  return [results](const OpCall& call) -> std::optional<ShardingRule> {
    ShardingRule rule = rules::start(call);
    const rules::TensorFactors elements = rules::add_factors(rule, call.tensors.front().sizes);
    for (std::size_t i = 0; i < call.tensors.size(); ++i) {
      if (call.tensors[i].sizes != call.tensors.front().sizes) {
        return std::nullopt;
      }
      rule.inputs[i] = elements;
    }
    rule.outputs.assign(results, elements);
    return rule;
  };
}

namespace {

/// Returns the autograd node that can recompute `tensor`; nullptr if `tensor` must be saved.
NodePtr<Node> maker_of(const at::Tensor& tensor) {
  auto* node = dynamic_cast<RecomputableNode*>(tensor.grad_fn().get());
  const bool recomputes = node != nullptr && !hooks_keep_tensors() && node->can_recompute(tensor);
  return recomputes ? pointer_to(*node) : nullptr;
}

}  // namespace

KeptTensor::KeptTensor(const at::Tensor& tensor) : maker_(maker_of(tensor)) {
  if (maker_ == nullptr) {
    saved_ = SavedVariable(tensor, /*is_output=*/false);
  }
}

bool KeptTensor::takes_gradient() const {
  return maker_ != nullptr && static_cast<const RecomputableNode&>(*maker_).takes_gradient();
}

at::Tensor KeptTensor::unpack(const at::Tensor& gradient) const {
  return maker_ == nullptr ? saved_.unpack()
                           : static_cast<RecomputableNode&>(*maker_).recompute_for(gradient);
}

}  // namespace tessera::detail
