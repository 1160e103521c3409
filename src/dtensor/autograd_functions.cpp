#include "autograd_functions.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <string>
#include <utility>

#include "distributed_impl.h"
#include "leaf_gradient.h"
#include "other_mesh.h"
#include "redistribute.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/operator_mode.h"

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
    return {from_local_with_gradient(gradients[0], spec->sharding, spec->sizes,
                                     gradient_layout(spec->sharding.layout))};
  }
  std::string name() const override { return "ToLocalBackward"; }
  TensorSpecPtr spec;
};

struct RedistributeBackward final : Node {
  RedistributeBackward(ShardingSpec s, c10::ScalarType t, const RedistributeOptions& o)
      : sharding(std::move(s)), dtype(t), options(o) {}
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    const auto travels = gradients[0].to(options.backward_dtype.value_or(dtype));
    return {as_layout(travels, sharding, {.async = options.async}).to(dtype)};
  }
  std::string name() const override { return "RedistributeBackward"; }
  ShardingSpec sharding;
  c10::ScalarType dtype;
  RedistributeOptions options;
};

TensorSpecPtr with_layout(const TensorSpec& spec, LayoutPtr layout) {
  return intern_spec({{spec.sharding.mesh, layout}, spec.sizes, spec.strides, spec.dtype});
}

/// Strides of the whole of which `local` is a part: in the order of its own. Where some rank's part
/// is too thin to tell it, contiguous on all ranks, and `local` is made so.
std::vector<std::int64_t> strides_of_whole(at::Tensor& local, c10::IntArrayRef sizes, bool told) {
  if (told) return strides_in_order_of(sizes, local.strides());
  local = local.contiguous();
  return detail::contiguous_strides(sizes);
}

/// This rank's part, to be written to. What a detached view holds is a copy already, and a write to
/// it would reach the view and not the viewed tensor: such a view gives away another copy.
at::Tensor own_local(const DistributedTensorImpl& impl) {
  return plain_alias(impl.detached_view() ? impl.local().clone() : impl.local());
}

/// The value below autograd, waited for later. Undefined, and nothing is done, where no collective
/// is needed or the mesh is another.
at::Tensor pending(const DistributedTensorImpl& impl, const ShardingSpec& target) {
  const auto& spec = impl.spec();
  if (spec->sharding.mesh != target.mesh) return {};
  auto transfer = start_plan(plan_for(spec, target.layout), impl.local(), target.mesh, spec->sizes);
  if (transfer == nullptr) return {};
  return wrap_pending(
      std::move(transfer), impl.local(),
      intern_spec({target, spec->sizes, detail::contiguous_strides(spec->sizes), spec->dtype}));
}

/// The value below autograd. A tensor of its own: a write to it must not reach the source.
at::Tensor redistributed(const DistributedTensorImpl& impl, const ShardingSpec& target) {
  const auto& spec = impl.spec();
  auto local = spec->sharding.mesh == target.mesh
                   ? redistribute_local(impl.local(), spec, target.layout)
                   : move_to_mesh(impl.local(), spec, target);
  const bool shares = local.is_same(impl.local()) || local.is_alias_of(impl.local());
  if (shares && !local.is_meta()) local = local.detach().clone();
  const bool told = parts_tell_order(*spec->sharding.layout, spec->sizes) &&
                    parts_tell_order(*target.layout, spec->sizes);
  auto strides = strides_of_whole(local, spec->sizes, told);
  return wrap(std::move(local),
              intern_spec({target, spec->sizes, std::move(strides), spec->dtype}));
}

/// The same, or what a mode has in its place.
at::Tensor redistributed_by_mode(const DistributedTensorImpl& impl, const ShardingSpec& target) {
  OperatorMode* mode = active_operator_mode();
  if (mode == nullptr) return redistributed(impl, target);
  static const std::string name = "tessera::redistribute";
  const auto run = [&] { return OperatorMode::Results{redistributed(impl, target)}; };
  return mode->call({name}, run).front().toTensor();
}

}  // namespace

LayoutPtr gradient_layout(LayoutPtr layout) {
  if (!layout->is_partial()) return layout;
  return Layout::intern(layout->mesh_sizes(), layout->dims());
}

at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes, LayoutPtr gradient) {
  // An expanded gradient, a slice: the wrapper's strides must be those of its parts.
  const bool told = parts_tell_order(*sharding.layout, sizes);
  if (!local.is_non_overlapping_and_dense() || (!told && !local.is_contiguous())) {
    return from_local_with_gradient(local.contiguous(), sharding, sizes, gradient);
  }
  auto alias = plain_alias(local);
  auto strides = strides_of_whole(alias, sizes, told);
  auto spec = intern_spec({sharding, sizes.vec(), std::move(strides), local.scalar_type()});
  return record<FromLocalBackward>(wrap(std::move(alias), std::move(spec)), local,
                                   ShardingSpec{sharding.mesh, gradient});
}

at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient) {
  auto& impl = *as_distributed(tensor);
  check_readable(impl, "to_local()");
  keep_gradient_layout(impl, tensor);
  return record<ToLocalBackward>(own_local(impl), tensor, with_layout(*impl.spec(), gradient));
}

at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const ShardingSpec& target,
                                      const RedistributeOptions& options) {
  const auto& impl = impl_of(tensor);
  check_readable(impl, "redistribute()");
  const auto& source = impl.spec()->sharding;
  if (source == target) return tensor;
  const comm::CallerScope caller("redistribute");
  auto result = options.async ? pending(impl, target) : at::Tensor();
  if (!result.defined()) result = redistributed_by_mode(impl, target);
  return record<RedistributeBackward>(std::move(result), tensor,
                                      ShardingSpec{source.mesh, gradient_layout(source.layout)},
                                      tensor.scalar_type(), options);
}

at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding,
                     const RedistributeOptions& options) {
  if (as_distributed(tensor) != nullptr) {
    return redistribute_with_gradient(tensor, sharding, options);
  }
  const ShardingSpec replicated{sharding.mesh, Layout::replicated(sharding.layout->mesh_sizes(),
                                                                  static_cast<int>(tensor.dim()))};
  return redistribute_with_gradient(
      from_local_with_gradient(tensor, replicated, tensor.sizes(), replicated.layout), sharding,
      options);
}

}  // namespace tessera::detail
