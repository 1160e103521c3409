#include "leaf_gradient.h"

#include <torch/csrc/autograd/variable.h>

#include "autograd_functions.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/policy.h"

namespace tessera::detail {

bool is_trainable_leaf(const DistributedTensorImpl& impl) {
  return static_cast<const torch::autograd::AutogradMeta*>(impl.autograd_meta())->requires_grad_;
}

void install_gradient_hook(DistributedTensorImpl& impl, const at::Tensor& tensor) {
  impl.set_gradient_hook();
  // The spec, not the tensor: the hook lives in the tensor's own autograd state.
  tensor.register_hook([spec = impl.spec()](const at::Tensor& gradient) {
    if (!gradient.defined()) return gradient;
    return as_layout(gradient, {spec->sharding.mesh, gradient_layout(spec->sharding.layout)});
  });
}

}  // namespace tessera::detail

namespace tessera {

bool leave_gradient_pending(const at::Tensor& leaf) {
  detail::DistributedTensorImpl* impl = detail::as_distributed(leaf);
  TESSERA_CHECK(impl != nullptr, "leave_gradient_pending was asked for a plain tensor");
  if (impl->has_gradient_hook()) return false;
  impl->set_gradient_hook();
  return true;
}

}  // namespace tessera
