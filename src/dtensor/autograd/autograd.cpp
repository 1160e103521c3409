#include <string>
#include <utility>

#include "autograd/autograd.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

// Differentiable from_local, to_local and redistribute. Each call records one autograd node; its
// operators run on local tensors, below autograd. The backward of a node records a node as well,
// for second derivatives.

namespace {

/// Records in autograd's graph that a new node Backward(arguments) computed `output` from `input`.
/// `output` must have no autograd history and must not share a TensorImpl with `input`.
template <class Backward, class... Arguments>
at::Tensor record(at::Tensor output, const at::Tensor& input, Arguments&&... arguments) {
  if (!is_recorded(input)) {
    return output;
  }
  const auto node = make_node<Backward>(std::forward<Arguments>(arguments)...);
  set_inputs(*node, input);
  set_node(output, node);
  return output;
}

/// The autograd node of from_local. Backward redistributes the gradient to the layout `sharding`,
/// which the caller of from_local chose, and returns the local tensor of the result.
struct FromLocalBackward final : Node {
  explicit FromLocalBackward(ShardingSpec s) : sharding(std::move(s)) {}
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) {
      return {at::Tensor()};
    }
    return {to_local_with_gradient(as_layout(gradients[0], sharding), sharding.layout)};
  }
  std::string name() const override { return "FromLocalBackward"; }
  ShardingSpec sharding;
};

/// The autograd node of to_local. Backward makes a distributed tensor from the plain gradient, with
/// the layout and global sizes in `spec`.
struct ToLocalBackward final : Node {
  explicit ToLocalBackward(TensorSpecPtr s) : spec(std::move(s)) {}
  variable_list apply(variable_list&& gradients) override;
  std::string name() const override { return "ToLocalBackward"; }
  TensorSpecPtr spec;
};

/// The autograd node of redistribute. Backward redistributes the gradient to the layout that the
/// input had, asynchronously if the forward was asynchronous.
struct RedistributeBackward final : Node {
  RedistributeBackward(ShardingSpec s, const RedistributeOptions& o)
      : sharding(std::move(s)), options(o) {}
  variable_list apply(variable_list&& gradients) override {
    return {gradients[0].defined() ? as_layout(gradients[0], sharding, options) : at::Tensor()};
  }
  std::string name() const override { return "RedistributeBackward"; }
  ShardingSpec sharding;
  RedistributeOptions options;
};

/// Returns the local tensor for to_local(). A detached view is copied, because a write by the
/// caller would change the view but not its base.
at::Tensor own_local(const DistributedTensorImpl& impl) {
  return alias_tensor(impl.detached_view() ? impl.local().clone() : impl.local());
}

/// Starts an asynchronous redistribution, without autograd. Returns an undefined tensor if no
/// collective is needed. The result's spec has contiguous strides, because the real strides are
/// unknown before the collective ends.
at::Tensor pending(const DistributedTensorImpl& impl, const ShardingSpec& target,
                   bool source_unchanged) {
  const auto& spec = impl.spec();
  auto transfer = start_plan(plan_for(spec, target.layout), impl.local(), target.mesh, spec->sizes,
                             source_unchanged);
  if (transfer == nullptr) {
    return {};
  }
  return wrap_pending(
      std::move(transfer), impl.local(),
      intern_spec({target, spec->sizes, detail::contiguous_strides(spec->sizes), spec->dtype}));
}

/// Redistributes without autograd. The result never shares memory with the tensor of `impl`.
at::Tensor redistributed(const DistributedTensorImpl& impl, const ShardingSpec& target) {
  const auto& spec = impl.spec();
  auto local = redistribute_local(impl.local(), spec, target.layout);
  const bool shares = local.is_same(impl.local()) || local.is_alias_of(impl.local());
  if (shares && !local.is_meta()) {
    local = local.detach().clone();
  }
  const bool agreed = shards_agree_on_stride_order(*spec->sharding.layout, spec->sizes) &&
                      shards_agree_on_stride_order(*target.layout, spec->sizes);
  local = agreed ? local : local.contiguous();
  auto strides = global_strides(spec->sizes, local.strides(), agreed);
  return wrap(std::move(local),
              intern_spec({target, spec->sizes, std::move(strides), spec->dtype}));
}

/// Redistributes through the active OperatorMode, if there is one. Selective activation
/// checkpointing is an OperatorMode that can return a saved result.
at::Tensor redistributed_by_mode(const DistributedTensorImpl& impl, const ShardingSpec& target) {
  OperatorMode* mode = active_operator_mode();
  if (mode == nullptr) {
    return redistributed(impl, target);
  }
  static const std::string name = "tessera::redistribute";
  const auto run = [&] { return OperatorMode::Results{redistributed(impl, target)}; };
  return mode->call({name}, run).front().toTensor();
}

/// With TESSERA_DEBUG=1, compares a local gradient between ranks along replicated mesh dimensions,
/// to find gradients that the caller of to_local() should have reduced. Collective.
void compare_local_gradients(const at::Tensor& gradient, const TensorSpec& spec) {
  const DeviceMesh& mesh = spec.sharding.mesh;
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    if (is_replicated_on(*spec.sharding.layout, dim)) {
      check_replicas(
          peers_along(mesh, dim), {{"the gradient", gradient}}, Equality::kRounded,
          concat("to_local: the local gradient of a tensor ", c10::IntArrayRef(spec.sizes),
                 " must be equal on the ranks of ", to_string(mesh), " along mesh dimension ", dim),
          "if each rank computes one term of a sum, pass Partial in grad_placements (for local_map "
          "in in_grad_placements)");
    }
  }
}

variable_list ToLocalBackward::apply(variable_list&& gradients) {
  if (!gradients[0].defined()) {
    return {at::Tensor()};
  }
  if (checks_calls()) {
    compare_local_gradients(gradients[0].detach(), *spec);
  }
  return {from_local_with_gradient(gradients[0], spec->sharding, spec->sizes,
                                   gradient_layout(spec->sharding.layout))};
}

}  // namespace

/// from_local without checks; not collective. If the local tensor must be made contiguous, autograd
/// records the copy.
at::Tensor from_local_with_gradient(const at::Tensor& local, const ShardingSpec& sharding,
                                    c10::IntArrayRef sizes, LayoutPtr gradient) {
  const at::Tensor dense = dense_local(local, sharding, sizes);
  return record<FromLocalBackward>(wrap_local(dense, sharding, sizes), dense,
                                   ShardingSpec{sharding.mesh, gradient});
}

/// Differentiable to_local(). The first use of a leaf also installs the hook that redistributes the
/// gradient of the leaf to the layout of the leaf.
at::Tensor to_local_with_gradient(const at::Tensor& tensor, LayoutPtr gradient) {
  auto& impl = *as_distributed(tensor);
  check_readable(impl, "to_local()");
  keep_gradient_layout(impl, tensor);
  const LayoutPtr layout = impl.spec()->sharding.layout;
  const bool gives_part =
      !layout->is_replicated() && c10::multiply_integers(layout->mesh_sizes()) > 1;
  if (const RandomRegionPtr& region = random_region(); region && gives_part) {
    region->note_part();
  }
  const TensorSpec& spec = *impl.spec();
  return record<ToLocalBackward>(
      own_local(impl), tensor,
      intern_spec({{spec.sharding.mesh, gradient}, spec.sizes, spec.strides, spec.dtype}));
}

at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const ShardingSpec& target,
                                      const RedistributeOptions& options) {
  const auto& impl = impl_of_distributed(tensor);
  check_readable(impl, "redistribute()");
  const auto& source = impl.spec()->sharding;
  if (source == target) {
    return tensor;
  }
  TESSERA_CHECK(source.mesh == target.mesh, "redistribute from ", to_string(source.mesh), " to ",
                to_string(target.mesh),
                ": redistribute cannot change the mesh; pass full_tensor() to distribute_tensor "
                "with the other mesh");
  const comm::CallerScope caller("redistribute");
  auto result = options.async ? pending(impl, target, options.source_unchanged) : at::Tensor();
  if (!result.defined()) {
    result = redistributed_by_mode(impl, target);
  }
  return record<RedistributeBackward>(std::move(result), tensor,
                                      ShardingSpec{source.mesh, gradient_layout(source.layout)},
                                      options);
}

at::Tensor as_layout(const at::Tensor& tensor, const ShardingSpec& sharding,
                     const RedistributeOptions& options) {
  if (as_distributed(tensor) != nullptr) {
    return redistribute_with_gradient(tensor, sharding, options);
  }
  // A plain gradient counts as replicated: libtorch's gradient formulas return plain tensors in
  // some cases in which all ranks compute equal values.
  const ShardingSpec replicated{sharding.mesh, Layout::replicated(sharding.layout->mesh_sizes(),
                                                                  static_cast<int>(tensor.dim()))};
  return redistribute_with_gradient(
      from_local_with_gradient(tensor, replicated, tensor.sizes(), replicated.layout), sharding,
      options);
}

// Hooks on gradients. A leaf's hook redistributes the gradient to the leaf's layout, as optimizers
// expect. A plain tensor's hook converts a distributed gradient to a plain gradient.

void install_gradient_hook(DistributedTensorImpl& impl, const at::Tensor& tensor) {
  impl.set_gradient_hook();
  // The hook captures the spec of the tensor, not the tensor. The tensor owns the hook, so a
  // captured tensor would never be freed.
  add_own_hook(tensor, OwnHook::kLayout, [spec = impl.spec()](const at::Tensor& gradient) {
    if (!gradient.defined()) {
      return gradient;
    }
    return as_layout(gradient, {spec->sharding.mesh, gradient_layout(spec->sharding.layout)});
  });
}

namespace {

at::Tensor make_plain(const at::Tensor& gradient) {
  if (!gradient.defined() || !tessera::is_distributed(gradient)) {
    return gradient;
  }
  const ShardingSpec& spec = sharding_spec(gradient);
  const LayoutPtr whole =
      Layout::replicated(spec.layout->mesh_sizes(), static_cast<int>(gradient.dim()));
  return to_local_with_gradient(as_layout(gradient, {spec.mesh, whole}), whole);
}

}  // namespace

void keep_gradient_plain(const at::Tensor& tensor) {
  if (!has_own_hook(tensor, OwnHook::kMakePlain)) {
    add_own_hook(tensor, OwnHook::kMakePlain, &make_plain);
  }
}

}  // namespace tessera::detail
