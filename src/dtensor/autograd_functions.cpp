#include "autograd_functions.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <string>
#include <utility>

#include "distributed_impl.h"
#include "redistribute.h"
#include "tessera/core/error.h"

namespace tessera::detail {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

const DistributedTensorImpl& impl_of(const at::Tensor& tensor) {
  const auto* impl = as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "internal: a distributed tensor was expected");
  return *impl;
}

/// Makes `output` the result of a Backward node (constructed from `arguments`) of `input`.
template <class Backward, class... Arguments>
at::Tensor record(at::Tensor output, const at::Tensor& input, Arguments&&... arguments) {
  if (!torch::autograd::compute_requires_grad(input)) return output;
  std::shared_ptr<Backward> node(new Backward(std::forward<Arguments>(arguments)...),
                                 torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, node);
  return output;
}

struct FromLocalBackward final : Node {
  explicit FromLocalBackward(ShardingSpec s) : sharding(std::move(s)) {}
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {to_local_with_gradient(as_layout(gradients[0], sharding), sharding.layout)};
  }
  std::string name() const override { return "FromLocalBackward"; }
  ShardingSpec sharding;
};

struct ToLocalBackward final : Node {
  explicit ToLocalBackward(TensorSpecPtr s) : spec(std::move(s)) {}
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {from_local_with_gradient(gradients[0], spec->sharding, spec->sizes)};
  }
  std::string name() const override { return "ToLocalBackward"; }
  TensorSpecPtr spec;
};

struct RedistributeBackward final : Node {
  RedistributeBackward(ShardingSpec s, c10::ScalarType t, c10::ScalarType travels)
      : sharding(std::move(s)), dtype(t), travel_dtype(travels) {}
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {as_layout(gradients[0].to(travel_dtype), sharding).to(dtype)};
  }
  std::string name() const override { return "RedistributeBackward"; }
  ShardingSpec sharding;
  c10::ScalarType dtype;
  c10::ScalarType travel_dtype;
};

TensorSpecPtr with_layout(const TensorSpec& spec, LayoutPtr layout) {
  return intern_spec({{spec.sharding.mesh, layout}, spec.sizes, spec.strides, spec.dtype});
}

}  // namespace

LayoutPtr gradient_layout(LayoutPtr layout) {
  if (!layout->is_partial()) return layout;
  return Layout::intern(layout->mesh_sizes(), layout->dims());
}

at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes) {
  // An expanded gradient, a slice: the wrapper's strides must be those of its parts.
  if (!local.is_non_overlapping_and_dense()) {
    return from_local_with_gradient(local.contiguous(), sharding, sizes);
  }
  auto spec = intern_spec(
      {sharding, sizes.vec(), strides_in_order_of(sizes, local.strides()), local.scalar_type()});
  return record<FromLocalBackward>(wrap(plain_alias(local), std::move(spec)), local,
                                   ShardingSpec{sharding.mesh, gradient_layout(sharding.layout)});
}

at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient) {
  const auto& impl = impl_of(tensor);
  return record<ToLocalBackward>(plain_alias(impl.local()), tensor,
                                 with_layout(*impl.spec(), gradient));
}

at::Tensor redistribute_with_gradient(const at::Tensor& tensor, LayoutPtr target,
                                      std::optional<c10::ScalarType> backward_dtype) {
  const auto& impl = impl_of(tensor);
  const auto& source = impl.spec()->sharding;
  if (source.layout == target) return tensor;
  auto local = redistribute_local(impl.local(), impl.spec(), target);
  // The result is a tensor of its own: a write to it must not reach the source.
  const bool shares = local.is_same(impl.local()) || local.is_alias_of(impl.local());
  if (shares && !local.is_meta()) local = local.detach().clone();
  auto spec = intern_spec({{source.mesh, target},
                           impl.spec()->sizes,
                           strides_in_order_of(impl.spec()->sizes, local.strides()),
                           local.scalar_type()});
  return record<RedistributeBackward>(wrap(std::move(local), std::move(spec)), tensor,
                                      ShardingSpec{source.mesh, gradient_layout(source.layout)},
                                      tensor.scalar_type(),
                                      backward_dtype.value_or(tensor.scalar_type()));
}

at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding) {
  if (as_distributed(tensor) != nullptr) {
    return redistribute_with_gradient(tensor, sharding.layout);
  }
  const ShardingSpec replicated{sharding.mesh, Layout::replicated(sharding.layout->mesh_sizes(),
                                                                  static_cast<int>(tensor.dim()))};
  return redistribute_with_gradient(from_local_with_gradient(tensor, replicated, tensor.sizes()),
                                    sharding.layout);
}

}  // namespace tessera::detail
