// The gradient of a leaf: backward may choose any layout that is cheap for it, while optimizers
// expect it to be sharded as the leaf is. The hook is installed late, at a leaf's first use: most
// distributed tensors are not leaves, and pay only for a flag. Also the gradient of a plain tensor
// that took part in an operator on distributed ones.

#include "autograd/leaf_gradient.h"

#include "autograd/autograd_functions.h"
#include "tessera/internals/detail/backward.h"

namespace tessera::detail {

/// Runs before the gradient is accumulated, on each gradient that arrives. Collective then, on
/// every rank in the order of backward.
void install_gradient_hook(DistributedTensorImpl& impl, const at::Tensor& tensor) {
  impl.set_gradient_hook();
  // Holds the spec, not the tensor, which owns the hook: that would be a cycle.
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

/// A leaf meets operators in every step, and keeps its hooks.
void keep_gradient_plain(const at::Tensor& tensor) {
  // Without GradMode, too: the forward of a torch::autograd::Function runs so.
  if (!has_own_hook(tensor, OwnHook::kMakePlain)) {
    add_own_hook(tensor, OwnHook::kMakePlain, &make_plain);
  }
}

}  // namespace tessera::detail
